"""The demo: the paper's Table 1 at toy size, and a page that shows the heads. A few minutes on two cores."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from repulsive.data.generated import ASPECTS
from repulsive.data.prepared import Part, Prepared
from repulsive.diagnostics.report import (
    Cell,
    Chart,
    Content,
    Example,
    Metric,
    Reading,
    Row,
    Series,
    Table,
    write_report,
)
from repulsive.recipes import make_task, open_recipe
from repulsive.recipes.score import load_run
from repulsive.training import tables
from repulsive.training.launch import Spec, train_many
from repulsive.training.runs import RunFolder, versions

METHODS = ("ma", "frobenius", "svgd", "spos")
METRICS = {
    "accuracy": Metric("accuracy", "higher", 1, percent=True),
    "nll": Metric("NLL", "lower", 3),
    "dist": Metric("Dist", "neither", 3, meaning="mean distance between what two heads make of a sentence"),
    "relative_dist": Metric("relative Dist", "neither", 3, meaning="Dist over the mean norm: the same at any scale"),
    "overlap": Metric("overlap", "neither", 3, meaning="attention that two heads have in common"),
    "coverage": Metric("evidence coverage", "higher", 1, percent=True, meaning="aspects that some head looks at"),
    "ece15": Metric("ECE", "lower", 3, meaning="calibration error, 15 bins"),
}
CHARTS = {
    "training loss, penalty included": ("train", "loss"),
    "dev accuracy": ("dev", "accuracy"),
    "overlap of heads": ("dev", "overlap"),
}
SHOWN = 6  # examples on the page
SURE = 0.05  # p-value below which a difference is called one


@dataclass(frozen=True)
class Demo:
    """What the demo trains, and where.

    Args:
        data: the prepared data set.
        about: one sentence on it.
        recipes: folder of built-in recipes.
        out: where runs and page go.
        seeds: of every method.
        changes: `key=value`, for all runs.
    """

    data: Prepared
    about: str
    recipes: str
    out: Path
    seeds: int = 3
    changes: Sequence[str] = ()

    def run(self, jobs: int, tell: Callable[[str], None]) -> tuple[str, Path]:
        """Train what is not trained yet, and write the page.

        Returns:
            The table as text, and where the page is.
        """
        started = time.monotonic()
        specs = self.specs()
        on_terminal = sys.stderr.isatty()
        train_many(
            specs, make_task, jobs, None if on_terminal else lambda spec, how: tell(f"{spec.folder}: {how}"),
            show=on_terminal,
        )  # fmt: skip
        found = tables.rows([self.out / "runs" / method for method in METHODS])
        content = self._content(found, time.monotonic() - started)
        return tables.as_markdown(found), write_report(self.out / "report.html", content)

    def specs(self) -> list[Spec]:
        """The runs: every method with every seed, seed by seed."""
        changes = [f"data.folder={self.data.folder}", *self.changes]
        return [
            Spec(
                dataclasses.replace(open_recipe(f"{self.recipes}/{method}", changes), seed=seed),
                self.out / "runs" / method / f"seed-{seed}",
                "cpu",
            )
            for seed in range(self.seeds)
            for method in METHODS
        ]

    def _content(self, found: Sequence[tables.Row], seconds: float) -> Content:
        names = [name for name in METRICS if all(name in row.cells for row in found)]
        rows = [Row(row.label, [_cell(row, name) for name in names]) for row in found]
        caption = f"Test set, mean ± standard deviation over {self.seeds} seeds; weights chosen on the development set."
        return Content(
            title="Do heads repel?",
            lead=self.about,
            facts=self._facts(seconds),
            table=Table([METRICS[name] for name in names], rows, found[0].label, caption, _notes(found), SURE),
            charts=[_chart(name, kind, key, found) for name, (kind, key) in CHARTS.items()],
            examples=self._examples(found),
        )

    def _facts(self, seconds: float) -> list[tuple[str, str]]:
        parts = ", ".join(f"{len(part):,} {name}" for name, part in self.data.parts.items())
        used = ", ".join(f"{name} {number}" for name, number in versions().items() if name in ("repulsive", "torch"))
        return [
            ("data", f"{self.data.task}: {parts}"),
            ("words known", f"{len(self.data.vocabulary):,}"),
            ("trained in", f"{seconds:.0f} s, {self.seeds} seeds of {len(METHODS)} methods"),
            ("versions", used),
        ]

    def _examples(self, found: Sequence[tables.Row]) -> list[Example]:
        """A few sentences of the test set, as the first seed of every method reads them."""
        part = self.data.parts["test"]
        indices = _spread(part, SHOWN)
        readings = {row.label: self._read(RunFolder(row.folder / "seed-0"), indices) for row in found}
        examples = []
        for place, index in enumerate(indices.tolist()):
            words = [self.data.vocabulary.words[i] for i in part.sentences[0][index].tolist()]
            label = self._class(int(part.labels[index]))
            seen = [answers[place] for answers in readings.values()]
            seen = [dataclasses.replace(r, method=name) for r, name in zip(seen, readings, strict=True)]
            examples.append(Example(words, label, seen, _evidence(part, index, len(words))))
        return examples

    def _read(self, run: RunFolder, indices: Tensor) -> list[Reading]:
        _, model = load_run(run, torch.device("cpu"))
        tokens, lengths = self.data.parts["test"].sentences[0].padded(indices)  # [B, T]
        with torch.inference_mode():
            logits, attention, _ = model(tokens, lengths, collect=True)  # [B, C], [B, M, T]
        sure, guess = logits.softmax(-1).max(-1)  # [B]
        return [
            Reading("", self._class(int(guess[i])), float(sure[i]), attention[i, :, : int(lengths[i])])
            for i in range(len(indices))
        ]

    def _class(self, index: int) -> str:
        name = self.data.classes[index]
        return name if not name.isdigit() else f"{name} star{'' if name == '1' else 's'}"


def _cell(row: tables.Row, name: str) -> Cell:
    cell = row.cells[name]
    return Cell(cell.mean, None if cell.deviation != cell.deviation else cell.deviation, row.against.get(name))


def _notes(found: Sequence[tables.Row]) -> list[str]:
    """What the numbers say, and no more."""
    notes = []
    for row in found[1:]:
        verdicts = []
        for metric, better in (("accuracy", 1), ("nll", -1)):
            seen = row.against[metric]
            told = seen.p_value <= SURE and (seen.low > 0 or seen.high < 0)
            verdict = ("better" if seen.difference * better > 0 else "worse") if told else "no difference can be told"
            verdicts.append(f"{METRICS[metric].name} {verdict}")
        notes.append(f"{row.label} against {found[0].label}: {', '.join(verdicts)}.")
    seeds = len(found[0].seeds)
    least = 2 ** (1 - seeds)
    if SURE < least < 1:
        notes.append(f"With {seeds} seeds no p-value over seeds falls below {least:g}: read the intervals.")
    return notes


def _chart(name: str, kind: str, key: str, found: Sequence[tables.Row]) -> Chart:
    """A quantity over the steps, of every method's first seed."""
    series = []
    for row in found:
        lines = RunFolder(row.folder / "seed-0").lines()
        points = [(line["step"], line[key]) for line in lines if line["kind"] == kind and key in line]
        series.append(Series(row.label, points))
    return Chart(name, series)


def _spread(part: Part, count: int) -> Tensor:
    """Items of as many classes as there are, of middling length, so that a page shows them well."""
    lengths = part.lengths
    near = (lengths - lengths.float().median()).abs().argsort(stable=True)  # [N]
    chosen: list[int] = []
    for place in range(count):
        label = place % int(part.labels.max() + 1)
        chosen += [i for i in near.tolist() if int(part.labels[i]) == label and i not in chosen][:1]
    return torch.tensor(chosen)


def _evidence(part: Part, index: int, length: int) -> Mapping[str, Sequence[int]]:
    if part.evidence is None:
        return {}
    mask = part.evidence_mask(torch.tensor([index]), length)[0]  # [K, T]
    return {ASPECTS[k]: row.nonzero()[:, 0].tolist() for k, row in enumerate(mask) if row.any()}
