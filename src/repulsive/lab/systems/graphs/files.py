"""Which files of graphs a folder holds, found from their names, and how they are read."""

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
# What each form calls the files of train, dev and test, the form that is taken first on top.
FORMS = {
    "agenda tsv": tuple(f"preprocessed.{part}.tsv" for part in ("train", "val", "test")),
    "agenda json": tuple(f"unprocessed.{part}.json" for part in ("train", "val", "test")),
    "webnlg": tuple(f"{part}.jsonl" for part in PARTS),
}


@dataclass(frozen=True)
class GraphFiles:
    """The files of a data set.

    Args:
        form: a key of `FORMS`.
        parts: the file of each part.
        members: of each part the name within an archive; empty where there is none.
        relations: the file that names the relations, where there is one.
    """

    form: str
    parts: dict[str, Path]
    members: dict[str, str]
    relations: Path | None

    @property
    def in_words(self) -> bool:
        """Do spaces separate the words already?"""
        return self.form != "webnlg"

    def read(self, split: Tokenizer, lowercase: bool, limit: int) -> tuple[dict[str, Graphs], list[str] | None]:
        """The graphs of each part, and the relations' names where a file has them."""
        names = read_relations(self.relations) if self.relations is not None else None
        found = {}
        for part, path in self.parts.items():
            if self.form == "webnlg":
                found[part] = read_webnlg(path, split, limit=limit)
            elif self.form == "agenda tsv":
                found[part] = read_tsv_graphs(path, names or [], lowercase=lowercase, limit=limit)
            else:
                member = self.members.get(part)
                found[part] = read_json_graphs(path, names, member=member, lowercase=lowercase, limit=limit)
        return found, names


def find_graphs(folder: Path) -> GraphFiles:
    """What a folder holds.

    Raises:
        DataError: no form has a file for every part.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; it should hold the files of task 'graphs'")
    relations = find_file(folder, RELATIONS)
    missing = []
    for form, names in FORMS.items():
        found = {part: path for part, name in zip(PARTS, names, strict=True) if (path := find_file(folder, name))}
        if form == "agenda json" and not found and (archive := folder / ARCHIVE).is_file():
            return GraphFiles(form, dict.fromkeys(PARTS, archive), dict(zip(PARTS, names, strict=True)), relations)
        if len(found) == len(PARTS) and form == "agenda tsv" and relations is None:
            raise DataError(f"{folder}: no {RELATIONS}, which says what the numbers of relations mean")
        if len(found) == len(PARTS):
            return GraphFiles(form, found, {}, None if form == "webnlg" else relations)
        missing.append(next(name for part, name in zip(PARTS, names, strict=True) if part not in found))
    told = ", no ".join(missing)
    raise DataError(f"{folder}: no {told}, no {ARCHIVE}; a form needs all three parts, plain, .xz or .gz")
