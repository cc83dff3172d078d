"""Find the files of a graph dataset by their names, and read them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from repulsive.errors import DataError
from repulsive.lab.systems.graphs.agenda import read_json_graphs, read_relations, read_tsv_graphs
from repulsive.lab.systems.graphs.data import Graphs
from repulsive.lab.systems.graphs.webnlg import read_webnlg
from repulsive.lab.text.inputs import find_file
from repulsive.lab.text.prepared import PARTS
from repulsive.lab.text.tokens import Tokenizer

RELATIONS, ARCHIVE = "relations.vocab", "unprocessed.tar.gz"
# File names of train, dev and test in each file format, in order of preference.
FORMS = {
    "agenda tsv": tuple(f"preprocessed.{part}.tsv" for part in ("train", "val", "test")),
    "agenda json": tuple(f"unprocessed.{part}.json" for part in ("train", "val", "test")),
    "webnlg": tuple(f"{part}.jsonl" for part in PARTS),
}


@dataclass(frozen=True)
class GraphFiles:
    """The files of a graph dataset.

    Args:
        form: file format, a key of `FORMS`.
        parts: the file of each data split.
        members: the file name of each data split within an archive; empty without an archive.
        relations: the file with the names of the relations, if there is one.
    """

    form: str
    parts: dict[str, Path]
    members: dict[str, str]
    relations: Path | None

    @property
    def in_words(self) -> bool:
        """Whether the texts in the files are tokenised already."""
        return self.form != "webnlg"

    def read(self, split: Tokenizer, lowercase: bool, limit: int) -> tuple[dict[str, Graphs], list[str] | None]:
        """Read the graphs of each data split, and the names of the relations if there is a file with them."""
        names = read_relations(self.relations) if self.relations is not None else None
        graphs = {}
        for part, path in self.parts.items():
            if self.form == "webnlg":
                graphs[part] = read_webnlg(path, split, limit=limit)
            elif self.form == "agenda tsv":
                graphs[part] = read_tsv_graphs(path, names or [], lowercase=lowercase, limit=limit)
            else:
                member = self.members.get(part)
                graphs[part] = read_json_graphs(path, names, member=member, lowercase=lowercase, limit=limit)
        return graphs, names


def find_graphs(folder: Path) -> GraphFiles:
    """Find the graph files of a folder, in any of the file formats `FORMS`.

    Raises:
        DataError: no format has a file for every data split.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; it should hold the files of dataset 'graphs'")
    relations = find_file(folder, RELATIONS)
    missing = []
    for form, names in FORMS.items():
        files = {part: path for part, name in zip(PARTS, names, strict=True) if (path := find_file(folder, name))}
        if form == "agenda json" and not files and (archive := folder / ARCHIVE).is_file():
            return GraphFiles(form, dict.fromkeys(PARTS, archive), dict(zip(PARTS, names, strict=True)), relations)
        if len(files) == len(PARTS) and form == "agenda tsv" and relations is None:
            raise DataError(f"{folder}: no {RELATIONS}, which has the names of the relations")
        if len(files) == len(PARTS):
            return GraphFiles(form, files, {}, None if form == "webnlg" else relations)
        missing.append(next(name for part, name in zip(PARTS, names, strict=True) if part not in files))
    names_missing = ", no ".join(missing)
    raise DataError(f"{folder}: no {names_missing}, no {ARCHIVE}; all three parts are needed, plain, .xz or .gz")
