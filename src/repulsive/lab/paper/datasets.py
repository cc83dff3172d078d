"""Which data sets there are, which recipes train on them, how to prepare them, and whether they are the paper's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repulsive.errors import DataError
from repulsive.lab.paper.published import published
from repulsive.lab.systems.glue.data import TASKS as GLUE
from repulsive.lab.text.folders import MANIFEST, read_manifest
from repulsive.lab.text.prepared import PARTS

NEAR = 0.05  # sizes that differ by no larger share are the same: the paper rounds, and readers skip bad lines


@dataclass(frozen=True)
class DataSet:
    """A prepared folder by name.

    Args:
        name: of the folder below `--data`, and in tables.
        kind: task of its recipes.
        prepare: the words of `repulsive prepare` that make it; RAW stands for the files.
        recipes: folder of its recipes; "" is its name.
        prefix: of their names.
        stands_for: the data set of the paper in whose place it can be used.
        changes: `key=value` for all runs on it.
        place: the folder, where it is not the name.
    """

    name: str
    kind: str
    prepare: str
    recipes: str = ""
    prefix: str = ""
    stands_for: str = ""
    changes: tuple[str, ...] = ()
    place: str = ""

    @property
    def paper(self) -> str:
        """The data set of the paper that it is, or stands for."""
        return self.stands_for or self.name

    def folder(self, data: Path) -> Path:
        return data / (self.place or self.name)

    def recipe(self, method: str) -> str:
        """Name of the recipe of a method."""
        return f"{self.recipes or self.name}/{self.prefix}{method}"

    def command(self, data: Path) -> str:
        """What makes the folder."""
        return f"repulsive prepare {self.prepare} --out {self.folder(data)}"


# The Transformer-base of the paper, as far as the recipes of Europarl, which are searched as WMT14 is, are not.
_BASE = (
    "model.heads=8",
    "model.feed_forward=2048",
    "optimizer.lr=7e-4",
    "optimizer.weight_decay=0",
    "training.batch=25000",
)
# Words keep their capitals, which the paper's scores of WMT14 see; lengths and ratio are those of fairseq's script.
_CASED = "translation --data RAW --source en --target de --no-lowercase --most 32000"
_GLOVE = "--vectors GLOVE --size 300"
DATASETS = {
    data.name: data
    for data in (
        DataSet("age", "classification", f"age --data RAW {_GLOVE}"),
        DataSet("yelp", "classification", f"yelp --data RAW {_GLOVE}"),
        DataSet("snli", "classification", f"snli --data RAW {_GLOVE}"),
        DataSet("movie-reviews", "classification", "movie-reviews --data RAW", stands_for="yelp"),
        DataSet("reviews", "classification", "reviews", stands_for="yelp"),
        DataSet("iwslt14", "translation", "translation --data RAW --ratio 1.5"),
        DataSet("wmt14", "translation", f"{_CASED} --longest 80 --ratio 1.5", recipes="europarl", changes=_BASE),
        DataSet("multi30k", "translation", "translation --data RAW", prefix="small-", stands_for="iwslt14"),
        DataSet("tatoeba", "translation", "translation --data RAW", stands_for="iwslt14"),
        DataSet("europarl", "translation", _CASED, stands_for="wmt14"),
        DataSet("agenda", "graphs", "graphs --data RAW --minimum 5"),
        DataSet("webnlg", "graphs", "graphs --data RAW", stands_for="agenda"),
        DataSet("pretrain", "electra", "pretrain --data RAW --vocabulary VOCAB", recipes="electra", prefix="small-"),
        *(
            DataSet(name, "glue", f"glue --task {name} --data RAW --vocabulary VOCAB", "glue", place=f"glue/{name}")
            for name in GLUE
        ),
    )
}


def chosen(artefact: str, names: Sequence[str], wanted: Sequence[str]) -> list[DataSet]:
    """The data sets of an artefact: the paper's, or of those asked for the ones that fit.

    Args:
        artefact: its id, for the message.
        names: the paper's.
        wanted: of the command line; none: the paper's.

    Raises:
        DataError: a name is unknown, or none fits.
    """
    if unknown := [name for name in wanted if name not in DATASETS]:
        raise DataError(f"--datasets {unknown[0]!r}: is not known; choose from {', '.join(DATASETS)}")
    if not wanted:
        return [DATASETS[name] for name in names]
    fit = [data for data in DATASETS.values() if data.paper in names]
    found = [data for data in fit if data.name in wanted]
    if not found:
        raise DataError(f"{artefact}: none of {', '.join(wanted)} fits; it takes {', '.join(d.name for d in fit)}")
    return found


def check_there(needed: Sequence[DataSet], data: Path) -> None:
    """Raise one error that names every missing folder and the command that makes it.

    Raises:
        DataError: some are not there.
    """
    missing = [each for each in needed if not (each.folder(data) / MANIFEST).is_file()]
    if missing:
        told = "; ".join(f"{each.name}: {each.command(data)}" for each in missing)
        raise DataError(
            f"{data}: lacks {len(missing)} of {len(needed)} prepared folders; make them ({told}), or choose others "
            "with --datasets"
        )


@dataclass(frozen=True)
class Found:
    """A prepared folder, looked at.

    Args:
        name: of the data set.
        paper: the data set of the paper.
        folder: where it is.
        sizes: items of train, dev and test.
        other: why it is not the paper's data; "" where it is.
    """

    name: str
    paper: str
    folder: Path
    sizes: dict[str, int]
    other: str


def look(data: DataSet, root: Path, toy: bool, changes: Sequence[str] = ()) -> Found:
    """What a folder holds, and whether that is what the paper trained on, as far as sizes and languages tell.

    Args:
        data: the data set.
        root: folder of prepared folders.
        toy: it was generated.
        changes: `key=value` of the runs, of which `data.share` makes it another set.
    """
    folder = data.folder(root)
    manifest = read_manifest(folder)
    rows: dict[str, int] = manifest.get("rows", {})
    sizes = {part: int(rows[part]) for part in PARTS if part in rows}
    shares = [change for change in changes if change.startswith("data.share=")]
    other = "toy data" if toy else _other(data, manifest, sizes) or ", ".join(shares)
    return Found(data.name, data.paper, folder, sizes, other)


def _other(data: DataSet, manifest: dict[str, Any], sizes: dict[str, int]) -> str:
    told = published().dataset(data.name)
    if not told:
        return f"{data.name} instead of the paper's {data.paper}"
    if "documents" in told:
        have, wanted = sum(dict(manifest.get("documents", {})).values()), int(told["documents"])
        return "" if _near(have, wanted) else f"{have:,} documents instead of {wanted:,}"
    settings = manifest.get("settings", {})
    languages = [settings.get("source"), settings.get("target")]
    if "languages" in told and languages != told["languages"]:
        return f"from {languages[0]} into {languages[1]} instead of {' into '.join(told['languages'])}"
    for part, wanted in zip(PARTS, told["sizes"], strict=True):
        have = sizes.get(part, 0)
        if not _near(have, wanted):
            return f"{have:,} items of {part} instead of {wanted:,}"
    return ""


def _near(have: int, wanted: int) -> bool:
    return abs(have - wanted) <= NEAR * wanted
