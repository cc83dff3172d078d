"""The demo: the paper's Table 1 on a small dataset, and a page that shows the heads. A few minutes on two cores."""

from __future__ import annotations

import dataclasses
import io
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from repulsive.errors import ConfigError
from repulsive.lab.engine import tables
from repulsive.lab.engine.launch import Spec, train_many
from repulsive.lab.engine.result_tables import terminal_tables
from repulsive.lab.engine.runs import RunFolder, versions
from repulsive.lab.runs.results import results
from repulsive.lab.runs.score import load_run
from repulsive.lab.systems.classification.readings import read_examples, spread
from repulsive.lab.systems.datasets import prepare
from repulsive.lab.systems.registry import make_task, open_recipe
from repulsive.lab.text.prepared import Prepared
from repulsive.pages import Chart, Content, Example, Series, write_report
from repulsive.terminal.table import render

METHODS = ("ma", "frobenius", "svgd", "spos")
CHARTS = {
    "training loss, with penalty": ("train", "loss"),
    "dev accuracy": ("dev", "accuracy"),
    "overlap of heads": ("dev", "overlap"),
}
SHOWN = 6  # number of examples on the page
DATASETS = {  # dataset -> description on the page
    "reviews": "Generated reviews mention several aspects. The stars depend on all of them, and one counts three "
    "times. A head that reads one spot misses most of the evidence.",
    "movie-reviews": "Movie-review snippets with human ratings, in five classes of about the same size.",
}


@dataclass(frozen=True)
class Demo:
    """The runs and the page of the demo.

    Args:
        data: the prepared dataset.
        about: description of the dataset, shown on the page.
        recipes: folder of built-in recipes.
        out: output folder of runs and page.
        seeds: number of runs of each method.
        changes: `key=value` settings for all runs.
    """

    data: Prepared
    about: str
    recipes: str
    out: Path
    seeds: int = 3
    changes: Sequence[str] = ()

    def run(self, jobs: int, progress: Callable[[str], None]) -> tuple[str, Path]:
        """Train all runs that are not finished, and write the page.

        Args:
            jobs: parallel runs; 0: one per core.
            progress: called with a line when a run starts or ends; at a terminal a live table is shown instead.

        Returns:
            The table as text, and the path of the page.
        """
        started = time.monotonic()
        specs = self.specs()
        on_terminal = sys.stderr.isatty()
        train_many(
            specs,
            make_task,
            jobs,
            None if on_terminal else lambda spec, state: progress(f"{spec.folder}: {state}"),
            show=on_terminal,
        )
        rows = tables.rows([self.out / "runs" / method for method in METHODS])
        content = self._content(rows, time.monotonic() - started)
        table = render(terminal_tables(rows), io.StringIO())
        return table, write_report(self.out / "report.html", content)

    def specs(self) -> list[Spec]:
        """List the runs: all methods with the first seed, then with the second, and so on."""
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

    def _content(self, rows: Sequence[tables.Row], seconds: float) -> Content:
        over = "one seed" if self.seeds == 1 else f"mean ± standard deviation over {self.seeds} seeds"
        caption = f"Test set, {over}. Weights are selected on the development set."
        return Content(
            title="Repulsive attention: demo",
            lead=self.about,
            facts=self._facts(seconds),
            table=results(rows, caption),
            charts=[_chart(name, kind, key, rows) for name, (kind, key) in CHARTS.items()],
            examples=self._examples(rows),
        )

    def _facts(self, seconds: float) -> list[tuple[str, str]]:
        parts = ", ".join(f"{len(part):,} {name}" for name, part in self.data.parts.items())
        seeds = "one seed" if self.seeds == 1 else f"{self.seeds} seeds"
        used = ", ".join(f"{name} {number}" for name, number in versions().items() if name in ("repulsive", "torch"))
        return [
            ("data", f"{self.data.task}: {parts}"),
            ("vocabulary", f"{len(self.data.vocabulary):,}"),
            ("trained in", f"{seconds:.0f} s, {seeds} of {len(METHODS)} methods"),
            ("versions", used),
        ]

    def _examples(self, rows: Sequence[tables.Row]) -> list[Example]:
        """Read a few test sentences with the first seed of each method."""
        models = {row.label: load_run(RunFolder(row.folder / "seed-0"), torch.device("cpu"))[1] for row in rows}
        part = self.data.parts["test"]
        return read_examples(self.data, part, spread(part, SHOWN), models)


def _chart(name: str, kind: str, key: str, rows: Sequence[tables.Row]) -> Chart:
    """Plot a quantity of the first seed of each method against the step."""
    return Chart(name, [Series(row.label, RunFolder(row.folder / "seed-0").curve(kind, key)) for row in rows])


def make_demo(dataset: str, out: Path, seeds: int = 3, changes: Sequence[str] = ()) -> Demo:
    """Prepare a dataset for the demo, unless it is prepared already.

    Args:
        dataset: a name in `DATASETS`.
        out: output folder of data, runs and page.
        seeds: number of runs of each method.
        changes: `key=value` settings for all runs.

    Raises:
        ConfigError: the dataset is unknown.
    """
    if dataset not in DATASETS:
        raise ConfigError(f"--data {dataset!r}: choose {' or '.join(DATASETS)}")
    if dataset == "reviews":
        folder = out
        data = prepare(dataset, None, folder / "data", train=10_000, dev=1_000, test=2_000)
    else:
        folder = out / dataset
        data = prepare(dataset, out / "downloads", folder / "data", tokenizer="regex")
    return Demo(data, DATASETS[dataset], dataset, folder, seeds, tuple(changes))
