"""What all figures share: rows that are trained, a page that is drawn, and claims about numbers seed by seed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from repulsive.errors import RunError
from repulsive.lab.paper import toy
from repulsive.lab.paper.datasets import DataSet, Found, chosen, look
from repulsive.lab.paper.outcome import LABELS, Number, Report, Row
from repulsive.lab.paper.published import published
from repulsive.lab.paper.running import Options, RunSet, Tell, row
from repulsive.lab.paper.verdicts import Finding, Runs, judge
from repulsive.metrics.compare import Comparison
from repulsive.pages import Content, write_report
from repulsive.pages.figures.write import write_figures

PerSeed = Mapping[int, float]


@dataclass(frozen=True)
class Drawn:
    """What was measured for a figure.

    Args:
        content: of the page, without title and lead.
        numbers: method -> metric -> seed -> number.
        seen: (metric, first, second) -> first - second.
    """

    content: Content
    numbers: Mapping[str, Mapping[str, PerSeed]]
    seen: Mapping[tuple[str, str, str], Comparison | None] = field(default_factory=dict)


class Figure(ABC):
    """A figure on the runs of some methods; an artefact as those of `comparison`."""

    id: str
    title: str
    source: str
    data: tuple[str, ...]  # of the paper
    methods: tuple[str, ...] = ("ma", "svgd")
    lead: str = ""

    def trained_on(self, options: Options) -> list[DataSet]:
        """The data sets that runs are trained on."""
        return chosen(self.id, self.data, options.datasets)

    def needs(self, options: Options) -> list[DataSet]:
        return self.trained_on(options)

    def rows(self, options: Options) -> list[RunSet]:
        return [each for data in self.trained_on(options) for each in self.on(data, options).values()]

    def on(self, data: DataSet, options: Options) -> dict[str, RunSet]:
        """Method -> its runs on a data set."""
        hidden = toy.changes(data.kind) if options.toy else ()
        return {name: row(data, name, hidden=hidden) for name in self.methods}

    @abstractmethod
    def draw(self, data: DataSet, ended: Mapping[str, Runs], options: Options, tell: Tell) -> Drawn:
        """Measure what the figure shows."""

    def report(self, options: Options, tell: Tell) -> Report:
        rows: list[Row] = []
        findings: list[Finding] = []
        files: list[Path] = []
        found = [look(data, options.data, options.toy, options.changes) for data in self.needs(options)]
        for data in self.trained_on(options):
            sets = self.on(data, options)
            ended = {name: runs.finished(options) for name, runs in sets.items()}
            if lacking := [name for name, runs in ended.items() if not runs]:
                raise RunError(f"{self.id}: no run of {data.name}/{lacking[0]} has ended; the same command goes on")
            drawn = self.draw(data, ended, options, tell)
            files += self._write(data, drawn.content, options)
            rows += [
                Row(
                    data.name,
                    method,
                    label(method),
                    max(len(each) for each in metrics.values()),
                    {metric: Number(None, list(each.values())) for metric, each in metrics.items()},
                    sets[method].folder(options),
                )
                for method, metrics in drawn.numbers.items()
            ]
            findings += self._findings(data, drawn, found)
        return Report(self.id, self.title, self.source, found, rows, findings, files=files)

    def _findings(self, data: DataSet, drawn: Drawn, found: Sequence[Found]) -> list[Finding]:
        other = next((each.other for each in found if each.other), "")
        return [
            judge(
                replace(claim, data=data.name),
                drawn.seen.get((claim.metric, claim.first, claim.second)),
                other,
                "one seed, and no items to resample",
            )
            for claim in published().claims(self.id)
            if claim.data == data.paper
        ]

    def _write(self, data: DataSet, content: Content, options: Options) -> list[Path]:
        """The page, and its figures for papers."""
        name = f"{self.id}-{data.name}"
        titled = replace(content, title=f"{self.title[0].upper()}{self.title[1:]}: {data.name}", lead=self.lead)
        page = write_report(options.out / f"{name}.html", titled)
        drawn = write_figures(options.out / "figures" / name, titled)
        return [page, *dict.fromkeys(path.parent for path in drawn)]


def label(method: str) -> str:
    """What charts call a method."""
    return LABELS.get(method, method)
