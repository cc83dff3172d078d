"""Open finished runs for a report, and check that they were trained on the same data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import realpath
from pathlib import Path
from typing import Any

from repulsive.errors import RunError
from repulsive.lab.engine import tables
from repulsive.lab.engine.run_reader import DIVERGED
from repulsive.lab.engine.runs import RunFolder

PARTS = {"test": "test set", "dev": "development set"}


@dataclass(frozen=True, eq=False)
class Method:
    """The runs of one recipe, one per seed.

    Args:
        label: unique name in the report.
        folder: folder of the runs.
        runs: seed -> finished run.
        unfinished: seeds of the runs that have not finished.
    """

    label: str
    folder: Path
    runs: dict[int, RunFolder]
    unfinished: tuple[int, ...] = ()

    @property
    def first(self) -> RunFolder:
        """The run with the lowest seed."""
        return self.runs[min(self.runs)]

    def tables(self) -> dict[str, Any]:
        """The recipe, as nested tables."""
        return self.first.recipe

    def curves(self, kind: str, key: str) -> list[list[tuple[float, float]]]:
        """Return (step, value) pairs of a quantity in `metrics.jsonl`, for each seed that logged it."""
        return [points for run in self.runs.values() if (points := run.curve(kind, key))]


def open_methods(folders: Sequence[Path]) -> list[Method]:
    """Open the runs of some folders, in the order of the folders.

    Raises:
        RunError: a folder has no finished run, is given twice, or its runs were trained on other data.
    """
    methods: list[Method] = []
    for folder in folders:
        runs = tables.runs_in(folder)
        if not runs:
            raise RunError(f"{folder}: is neither a run nor a folder of runs; {tables.runs_below(folder)}")
        ended = {seed: run for seed, run in runs.items() if run.result is not None}
        if not ended and all(run.diverged for run in runs.values()):
            raise RunError(f"{folder}: every run here diverged; {DIVERGED} in its folder says where")
        if not ended:
            raise RunError(f"{folder}: no run here has finished; rerun the command that trained it to resume")
        if any(realpath(folder) == realpath(method.folder) for method in methods):
            raise RunError(f"{folder}: is given twice")
        unfinished = tuple(seed for seed in runs if seed not in ended)
        methods.append(Method(tables.label_of(folder, ended), folder, ended, unfinished))
    for method in methods:
        for run in method.runs.values():
            if _data(run) != _data(methods[0].first):
                raise RunError(
                    f"{run.path}: was trained on other data than {methods[0].first.path}; a report compares runs of "
                    "the same data"
                )
    labels = tables.unique_labels([(method.label, method.folder) for method in methods])
    return [dataclasses.replace(method, label=label) for method, label in zip(methods, labels, strict=True)]


def open_rows(methods: Sequence[Method], part: str) -> list[tables.Row]:
    """Make the table rows of some methods on a data split, from stored answers; the first is the baseline.

    Raises:
        RunError: a run was not evaluated on this data split.
    """
    return tables.rows([method.folder for method in methods], part)


def facts(methods: Sequence[Method]) -> list[tuple[str, str]]:
    """List facts about some runs as (name, value) pairs, for the top of a page: heads, time, device and versions."""
    runs = [run for method in methods for run in method.runs.values()]
    seconds = sum(float((run.result or {}).get("seconds", 0)) for run in runs)
    counts = (method.tables().get("model", {}).get("heads") for method in methods)
    heads = sorted({count for count in counts if isinstance(count, int) and count})
    started = methods[0].first.facts.get("started", {})
    versions = stored if isinstance(stored := started.get("versions"), dict) else {}
    return [
        ("heads", ", ".join(map(str, heads)) or "as the recipe has them"),
        ("trained in", f"{seconds:,.0f} s, {len(runs)} run{'' if len(runs) == 1 else 's'}"),
        ("device", str(started.get("device", "unknown"))),
        ("versions", ", ".join(f"{name} {versions[name]}" for name in ("repulsive", "torch") if name in versions)),
    ]


def part_name(part: str) -> str:
    """Return the display name of a data split."""
    return PARTS.get(part, f"test set {part}")


def _data(run: RunFolder) -> dict[str, str]:
    """Return the data checksums of a run, without word vectors and initial weights, which may differ between runs."""
    sums: dict[str, str] = run.facts.get("data", {})
    starts = ("vectors.safetensors", "start/")
    return {name: digest for name, digest in sums.items() if not name.startswith(starts)}
