"""What runs came to: mean and standard deviation over seeds, and paired comparisons with a baseline."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from repulsive.errors import RunError
from repulsive.metrics.compare import Comparison, compare
from repulsive.training.runs import RECIPE, RunFolder

COLUMNS = ("accuracy", "nll", "dist", "relative_dist", "overlap", "coverage", "ece15", "oe15", "ece100", "oe100")
COMPARED = {"accuracy": ("correct", 1.0), "nll": ("nll", -1.0)}  # metric -> its item-wise array, and the better sign


@dataclass(frozen=True)
class Cell:
    """A metric over seeds."""

    mean: float
    deviation: float  # of a sample; nan for one seed

    def __str__(self) -> str:
        return f"{self.mean:.4f}" if self.deviation != self.deviation else f"{self.mean:.4f} ± {self.deviation:.4f}"


@dataclass(frozen=True)
class Row:
    """One recipe's runs.

    Args:
        label: what the table calls it.
        folder: of its runs.
        seeds: which have ended.
        cells: metric -> mean and deviation.
        against: metric -> comparison with the baseline, first - baseline; nothing for the baseline itself.
    """

    label: str
    folder: Path
    seeds: tuple[int, ...]
    cells: dict[str, Cell]
    against: dict[str, Comparison]


def runs_in(folder: Path) -> dict[int, RunFolder]:
    """Seed -> run, of a folder of `seed-N` folders, or of one such folder."""
    if (folder / RECIPE).is_file():
        run = RunFolder(folder)
        return {int(run.recipe["seed"]): run}
    found = [RunFolder(path) for path in folder.glob("seed-*") if (path / RECIPE).is_file()]
    return {int(run.recipe["seed"]): run for run in sorted(found, key=lambda run: run.recipe["seed"])}


def rows(folders: Sequence[Path], part: str = "test") -> list[Row]:
    """A row for every folder; the first is the baseline all others are compared with, seed by seed and item by item.

    Args:
        folders: of runs, each with one or more seeds.
        part: "test" or "dev".

    Raises:
        RunError: a folder has no run that has ended.
    """
    ended = []
    for folder in folders:
        done = {seed: run for seed, run in runs_in(folder).items() if run.result is not None}
        if not done:
            raise RunError(f"{folder}: holds no run that has ended")
        ended.append(done)
    return [_row(folder, runs, part, ended[0]) for folder, runs in zip(folders, ended, strict=True)]


def _row(folder: Path, runs: dict[int, RunFolder], part: str, baseline: dict[int, RunFolder]) -> Row:
    results = [run.result or {} for run in runs.values()]
    names = [name for name in results[0][part] if all(name in result[part] for result in results)]
    cells = {name: cell([float(result[part][name]) for result in results]) for name in names}
    label = results[0].get("label") or str(folder)
    shared = sorted(runs.keys() & baseline.keys())
    against = {}
    if runs is not baseline and shared:
        over = "both" if len(shared) > 1 else "items"
        for metric, (array, _) in COMPARED.items():
            against[metric] = compare(_items(runs, shared, part, array), _items(baseline, shared, part, array), over)
    return Row(label, folder, tuple(runs), cells, against)


def cell(values: Sequence[float]) -> Cell:
    """Mean and standard deviation of a sample."""
    return Cell(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else float("nan"))


def _items(runs: dict[int, RunFolder], seeds: Sequence[int], part: str, name: str) -> Tensor:
    return torch.stack([runs[seed].items(part)[name].double() for seed in seeds])  # [S, N]


def as_markdown(found: Sequence[Row], columns: Sequence[str] = COLUMNS) -> str:
    """Rows as a Markdown table, with what the comparisons say below it."""
    shown = [name for name in columns if any(name in row.cells for row in found)]
    head = ["method", "seeds", *shown]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in found:
        cells = [str(row.cells[name]) if name in row.cells else "" for name in shown]
        lines.append("| " + " | ".join([row.label, str(len(row.seeds)), *cells]) + " |")
    notes = [
        f"- {row.label} against {found[0].label}, {metric}: {comparison}"
        for row in found
        for metric, comparison in row.against.items()
    ]
    return "\n".join([*lines, *(["", *notes] if notes else [])])
