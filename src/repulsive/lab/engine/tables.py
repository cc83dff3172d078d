"""Tables of finished runs: mean and standard deviation over seeds, and paired comparisons with a baseline."""

from __future__ import annotations

import math
import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repulsive.errors import RunError
from repulsive.lab.engine.run_reader import RECIPE
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.scores import COMPARED, TOTALLED, same_items
from repulsive.lab.engine.task import Evaluation
from repulsive.metrics.compare import Comparison, Over, compare, compare_totals
from repulsive.safety.markdown import escaped, format_table
from repulsive.terminal.document import finite

COLUMNS = (
    "bleu",
    "BLEU-1",
    "BLEU-2",
    "BLEU-3",
    "METEOR 1.5",
    "METEOR (NLTK)",
    "ROUGE-1",
    "ROUGE-2",
    "ROUGE-L",
    "entity coverage",
    "repeated clauses",
    "sacrebleu",
    "chrf",
    "matthews",
    "spearman",
    "pearson",
    "accuracy",
    "auc",
    "f1",
    "mse",
    "nats_per_byte",
    "nll",
    "generator_nll",
    "dist",
    "relative_dist",
    "overlap",
    "coverage",
    "ece15",
    "oe15",
    "ece100",
    "oe100",
)


@dataclass(frozen=True)
class Cell:
    """Mean and standard deviation of a metric over seeds."""

    mean: float
    deviation: float  # sample standard deviation; nan for one seed

    def __str__(self) -> str:
        return f"{self.mean:.4f}" if math.isnan(self.deviation) else f"{self.mean:.4f} ± {self.deviation:.4f}"


@dataclass(frozen=True)
class Row:
    """Results of the runs of one recipe, a row of a table.

    Args:
        label: name in the table.
        folder: folder of the runs.
        seeds: seeds of the finished runs.
        cells: metric -> mean and standard deviation over seeds.
        against: metric -> comparison with the baseline, this row - baseline; empty for the baseline itself.
    """

    label: str
    folder: Path
    seeds: tuple[int, ...]
    cells: dict[str, Cell]
    against: dict[str, Comparison]

    @property
    def collapsed(self) -> dict[int, int]:
        """Return seed -> step for the runs that collapsed to a constant output; see `collapsed_in`."""
        return collapsed_in(self.folder, self.seeds)

    @property
    def warnings(self) -> list[str]:
        """List warnings about the runs of this row, such as collapsed models."""
        return [f"{self.label}, seed {seed}: collapsed at step {step:,}" for seed, step in self.collapsed.items()]


def runs_in(folder: Path) -> dict[int, RunFolder]:
    """Return seed -> run for a folder with subfolders `seed-N`, or for a single run folder.

    Raises:
        RunError: two subfolders hold runs of the same seed.
    """
    if (folder / RECIPE).is_file():
        run = RunFolder(folder)
        return {run.seed: run}
    runs: dict[int, RunFolder] = {}
    for path in sorted(folder.glob("seed-*")):
        if (path / RECIPE).is_file():
            run = RunFolder(path)
            if (other := runs.setdefault(run.seed, run)) is not run:
                raise RunError(f"{other.path} and {path}: both hold seed {run.seed}; move one of them elsewhere")
    return dict(sorted(runs.items()))


def collapsed_in(folder: Path, seeds: Container[int]) -> dict[int, int]:
    """Return seed -> first step from which on the model gave a constant output, for runs in which it did."""
    steps = {seed: run.collapsed for seed, run in runs_in(folder).items() if seed in seeds}
    return {seed: step for seed, step in steps.items() if step is not None}


def finished_in(folder: Path) -> dict[int, RunFolder]:
    """Return seed -> run as `runs_in` does, for finished runs only.

    Raises:
        RunError: there is no such folder, or no finished run in it.
    """
    if not folder.is_dir():
        raise RunError(f"{folder}: no such folder; `repulsive ls` lists runs")
    runs = runs_in(folder)
    finished = {seed: run for seed, run in runs.items() if run.result is not None}
    if not finished:
        advice = "rerun the command that trained it to resume" if runs else runs_below(folder)
        raise RunError(f"{folder}: holds no finished run; {advice}")
    return finished


def runs_below(folder: Path) -> str:
    """Return advice for a folder without runs: the folders in it that hold the runs of a recipe, if there are any."""
    found = {path.parents[1] for path in folder.rglob(RECIPE)} - {folder, folder.parent}
    if not found:
        return "`repulsive ls` lists runs"
    shown = ", ".join(str(path) for path in sorted(found)[:4])
    return f"name the runs of one or more recipes: {shown}"


def ended(folders: Iterable[Path]) -> list[Path]:
    """Select the folders that hold a finished run."""
    return [folder for folder in folders if any(run.result is not None for run in runs_in(folder).values())]


def rows(folders: Sequence[Path], part: str = "test") -> list[Row]:
    """Make one row per folder; all rows are compared with the first, the baseline, seed by seed and item by item.

    Runs on other data than the baseline's have a row without a comparison.

    Args:
        folders: folders of runs, each with one or more seeds.
        part: data split: "test", "dev" or a further test set.

    Raises:
        RunError: a folder has no finished run, or a run that was not evaluated on the data split.
    """
    entries = []
    for folder in folders:
        done = finished_in(folder)
        answers = {seed: Evaluation(run.metrics(part), run.items(part)) for seed, run in done.items()}
        entries.append((label_of(folder, done), folder, answers))
    return table(entries)


def label_of(folder: Path, runs: Mapping[int, RunFolder]) -> str:
    """Return the name that a folder of runs has in a table."""
    return next(iter(runs.values())).recipe.get("label") or str(folder)


def table(entries: Sequence[tuple[str, Path, Mapping[int, Evaluation]]]) -> list[Row]:
    """Make rows from entries (label, folder, seed -> answers); the first entry is the baseline."""
    baseline = entries[0][2]
    labels = unique_labels([(label, folder) for label, folder, _ in entries])
    return [_row(label, *entry[1:], baseline) for label, entry in zip(labels, entries, strict=True)]


def unique_labels(labelled: Sequence[tuple[str, Path]]) -> list[str]:
    """Add the folder's name to labels that occur several times, or its whole path where the name does not suffice."""
    labels = []
    for label, folder in labelled:
        same = [other for other_label, other in labelled if other_label == label]
        name = folder.name if sum(other.name == folder.name for other in same) == 1 else str(folder)
        labels.append(label if len(same) == 1 else f"{label} ({name})")
    return labels


def _row(label: str, folder: Path, answers: Mapping[int, Evaluation], baseline: Mapping[int, Evaluation]) -> Row:
    metrics = [evaluation.metrics for evaluation in answers.values()]
    names = [name for name in metrics[0] if all(name in each for each in metrics)]
    cells = {name: cell([float(each[name]) for each in metrics]) for name in names}
    both_have = answers.keys() & baseline.keys()
    shared = sorted(seed for seed in both_have if same_items(answers[seed].items, baseline[seed].items))
    against = {}
    if answers is not baseline and shared:
        over: Over = "both" if len(shared) > 1 else "items"
        both = [each[seed] for each in (answers, baseline) for seed in shared]
        for metric, (array, score) in TOTALLED.items():
            if all(metric in each.metrics and array in each.items for each in both):
                pair = _items(answers, shared, array), _items(baseline, shared, array)
                against[metric] = compare_totals(*pair, score, over)
        for metric, array in COMPARED.items():
            if not all(array in each.items for each in both):
                continue
            against[metric] = compare(_items(answers, shared, array), _items(baseline, shared, array), over)
    return Row(label, folder, tuple(answers), cells, against)


def cell(values: Sequence[float]) -> Cell:
    """Compute mean and standard deviation of a sample."""
    return Cell(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else float("nan"))


def _items(answers: Mapping[int, Evaluation], seeds: Sequence[int], name: str) -> Tensor:
    return torch.stack([answers[seed].items[name].double().cpu() for seed in seeds])  # [S, N]


def as_markdown(records: Sequence[Row], columns: Sequence[str] = COLUMNS) -> str:
    """Format rows as a Markdown table, followed by a list of warnings and comparisons."""
    shown = [name for name in columns if any(name in row.cells for row in records)]
    head = ["method", "seeds", *shown]
    lines = []
    for row in records:
        cells = [str(row.cells[name]) if name in row.cells else "" for name in shown]
        lines.append([escaped(row.label), str(len(row.seeds)), *cells])
    notes = [f"- **{escaped(warning)}**" for row in records for warning in row.warnings]
    notes += [
        f"- {escaped(row.label)} against {escaped(records[0].label)}, {metric}: {comparison}"
        for row in records
        for metric, comparison in row.against.items()
    ]
    return "\n".join([format_table(head, lines), *(["", *notes] if notes else [])])


def as_plain(row: Row) -> dict[str, Any]:
    """Convert a row to JSON values; NaN, such as the standard deviation of one seed, becomes null."""
    plain: dict[str, Any] = finite(asdict(row) | {"folder": str(row.folder), "collapsed": row.collapsed})
    return plain
