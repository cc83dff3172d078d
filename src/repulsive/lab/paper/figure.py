"""Base class of figures: train some methods, measure, draw a page, and judge claims."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from repulsive.errors import RunError
from repulsive.lab.paper import toy
from repulsive.lab.paper.datasets import Dataset, PreparedData, choose_datasets, inspect_dataset
from repulsive.lab.paper.differences import Runs
from repulsive.lab.paper.mismatch import combine
from repulsive.lab.paper.options import Log, Options
from repulsive.lab.paper.published import published
from repulsive.lab.paper.report import Number, Report, Row, label_of
from repulsive.lab.paper.run_sets import RunSet, method_runs
from repulsive.lab.paper.verdicts import Finding, judge
from repulsive.metrics.compare import Comparison
from repulsive.pages import Content, write_report
from repulsive.pages.figures.write import write_figures

PerSeed = Mapping[int, float]


@dataclass(frozen=True)
class FigureData:
    """Measurements for a figure.

    Args:
        content: content of the page, without title and lead.
        numbers: method -> metric -> seed -> number.
        comparisons: (metric, first, second) -> first - second.
    """

    content: Content
    numbers: Mapping[str, Mapping[str, PerSeed]]
    comparisons: Mapping[tuple[str, str, str], Comparison | None] = field(default_factory=dict)


class Figure(ABC):
    """A figure about the runs of some methods; an `Artefact`."""

    id: str
    title: str
    source: str
    paper_datasets: tuple[str, ...]
    methods: tuple[str, ...] = ("ma", "svgd")
    lead: str = ""

    def training_datasets(self, options: Options) -> list[Dataset]:
        """List the datasets that the runs train on."""
        return choose_datasets(self.id, self.paper_datasets, options.datasets)

    def required_datasets(self, options: Options) -> list[Dataset]:
        return self.training_datasets(options)

    def run_sets(self, options: Options) -> list[RunSet]:
        return [runs for dataset in self.training_datasets(options) for runs in self.runs_on(dataset, options).values()]

    def runs_on(self, dataset: Dataset, options: Options) -> dict[str, RunSet]:
        """Return method -> its runs on a dataset."""
        hidden = toy.recipe_changes(dataset.kind, options)
        return {name: method_runs(dataset, name, hidden_changes=hidden) for name in self.methods}

    @abstractmethod
    def measure(self, dataset: Dataset, finished: Mapping[str, Runs], options: Options, log: Log) -> FigureData:
        """Measure the quantities that the figure shows."""

    def report(self, options: Options, log: Log) -> Report:
        rows: list[Row] = []
        findings: list[Finding] = []
        files: list[Path] = []
        prepared = [inspect_dataset(dataset, options) for dataset in self.required_datasets(options)]
        for dataset in self.training_datasets(options):
            run_sets = self.runs_on(dataset, options)
            finished = {name: runs.finished(options) for name, runs in run_sets.items()}
            if missing := [name for name, runs in finished.items() if not runs]:
                raise RunError(
                    f"{self.id}: no run of {dataset.name}/{missing[0]} has finished; rerun the same command to resume"
                )
            data = self.measure(dataset, finished, options, log)
            files += self._write(dataset, data.content, options)
            rows += [
                Row(
                    dataset.name,
                    method,
                    label_of(method),
                    max(len(by_seed) for by_seed in metrics.values()),
                    {metric: Number(None, list(by_seed.values())) for metric, by_seed in metrics.items()},
                    run_sets[method].folder(options),
                )
                for method, metrics in data.numbers.items()
            ]
            findings += self._findings(dataset, data, prepared)
        return Report(self.id, self.title, self.source, prepared, rows, findings, files=files)

    def _findings(self, dataset: Dataset, data: FigureData, prepared: Sequence[PreparedData]) -> list[Finding]:
        mismatch = combine(each.mismatch for each in prepared)
        return [
            judge(
                replace(claim, data=dataset.name),
                data.comparisons.get((claim.metric, claim.first, claim.second)),
                mismatch,
                "only one seed, and no test items to resample",
            )
            for claim in published().claims(self.id)
            if claim.data == dataset.paper_name
        ]

    def _write(self, dataset: Dataset, content: Content, options: Options) -> list[Path]:
        """Write the page and its figures; return the page and the folders of the figures."""
        name = f"{self.id}-{dataset.name}"
        titled = replace(content, title=f"{self.title[0].upper()}{self.title[1:]}: {dataset.name}", lead=self.lead)
        page = write_report(options.out / f"{name}.html", titled)
        figures = write_figures(options.out / "figures" / name, titled)
        return [page, *dict.fromkeys(path.parent for path in figures)]
