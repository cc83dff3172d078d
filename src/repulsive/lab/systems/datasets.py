"""Datasets by name: every dataset that a system declares can be prepared here.

prepare("yelp", "data/yelp", "prepared/yelp", vectors="glove.840B.300d.txt", size=300)
"""

from __future__ import annotations

import importlib
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from repulsive.errors import DataError
from repulsive.lab.text.dataset import Dataset
from repulsive.lab.text.progress import Progress

SYSTEMS = ("classification", "translation", "glue", "electra", "graphs", "lm")


@cache
def datasets() -> dict[str, Dataset]:
    """Return all datasets by name. Only declarations are imported, so this is fast and loads no torch."""
    modules = (importlib.import_module(f"repulsive.lab.systems.{system}.datasets") for system in SYSTEMS)
    return {dataset.name: dataset for module in modules for dataset in module.DATASETS}


def dataset_named(name: str) -> Dataset:
    """Return the dataset with a given name.

    Raises:
        DataError: no dataset has this name.
    """
    known = datasets()
    if name not in known:
        close = get_close_matches(name, known, 1, 0.6)
        hint = f"did you mean {close[0]!r}? Datasets" if close else "datasets"
        raise DataError(f"dataset {name!r} is unknown; {hint}: {', '.join(known)}")
    return known[name]


def prepare(
    task: str,
    data: str | Path | None,
    out: str | Path,
    *,
    jobs: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> Any:
    """Prepare a dataset, or load it if it was prepared from the same files with the same settings.

    Args:
        task: name of the dataset, such as "yelp"; `repulsive prepare --help` lists all.
        data: the folder or file it is read from; None for a dataset that is generated or downloaded.
        out: the folder to make.
        jobs: number of processes; None: one per processor. With more than one, guard the calling script with
            `if __name__ == "__main__":`.
        force: prepare the dataset again, even if it is prepared already.
        progress: called with the current stage, the items done and the total.
        settings: options of the dataset; `repulsive prepare DATASET --help` lists them.

    Returns:
        The loaded folder: `Prepared` for sentences with labels and for translation, `Blocks` for "pretrain",
        `PreparedGraphs` for "graphs", `Text` for "lm" and "lm-toy".

    Raises:
        DataError: an option is invalid, a file is missing or damaged, or the folder was prepared differently.
    """
    plan = dataset_named(task).make_plan(data, out, **settings)
    return (None if force else plan.existing()) or plan.make(jobs, progress)
