"""The demo: the paper's Table 1 at toy size, and a page that shows the heads. A few minutes on two cores."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from repulsive.lab.engine import tables
from repulsive.lab.engine.launch import Spec, train_many
from repulsive.lab.engine.runs import RunFolder, versions
from repulsive.lab.runs.results import results
from repulsive.lab.runs.score import load_run
from repulsive.lab.systems.classification.readings import read_examples, spread
from repulsive.lab.systems.registry import make_task, open_recipe
from repulsive.lab.text.prepared import Prepared
from repulsive.pages import Chart, Content, Example, Series, write_report

METHODS = ("ma", "frobenius", "svgd", "spos")
CHARTS = {
    "training loss, penalty included": ("train", "loss"),
    "dev accuracy": ("dev", "accuracy"),
    "overlap of heads": ("dev", "overlap"),
}
SHOWN = 6  # examples on the page


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
            specs,
            make_task,
            jobs,
            None if on_terminal else lambda spec, how: tell(f"{spec.folder}: {how}"),
            show=on_terminal,
        )
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
        over = "one seed" if self.seeds == 1 else f"mean ± standard deviation over {self.seeds} seeds"
        caption = f"Test set, {over}; weights chosen on the development set."
        return Content(
            title="Do heads repel?",
            lead=self.about,
            facts=self._facts(seconds),
            table=results(found, caption),
            charts=[_chart(name, kind, key, found) for name, (kind, key) in CHARTS.items()],
            examples=self._examples(found),
        )

    def _facts(self, seconds: float) -> list[tuple[str, str]]:
        parts = ", ".join(f"{len(part):,} {name}" for name, part in self.data.parts.items())
        seeds = "one seed" if self.seeds == 1 else f"{self.seeds} seeds"
        used = ", ".join(f"{name} {number}" for name, number in versions().items() if name in ("repulsive", "torch"))
        return [
            ("data", f"{self.data.task}: {parts}"),
            ("words known", f"{len(self.data.vocabulary):,}"),
            ("trained in", f"{seconds:.0f} s, {seeds} of {len(METHODS)} methods"),
            ("versions", used),
        ]

    def _examples(self, found: Sequence[tables.Row]) -> list[Example]:
        """A few sentences of the test set, as the first seed of every method reads them."""
        models = {row.label: load_run(RunFolder(row.folder / "seed-0"), torch.device("cpu"))[1] for row in found}
        part = self.data.parts["test"]
        return read_examples(self.data, part, spread(part, SHOWN), models)


def _chart(name: str, kind: str, key: str, found: Sequence[tables.Row]) -> Chart:
    """A quantity over the steps, of every method's first seed."""
    return Chart(name, [Series(row.label, RunFolder(row.folder / "seed-0").curve(kind, key)) for row in found])
