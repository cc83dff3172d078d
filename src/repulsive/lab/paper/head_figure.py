"""Figure 3: the error against the number of heads."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from repulsive.lab.paper import toy
from repulsive.lab.paper.datasets import DataSet, Found, chosen, look
from repulsive.lab.paper.outcome import LABELS, Number, Report, Row
from repulsive.lab.paper.published import Claim, published
from repulsive.lab.paper.running import Options, RunSet, Tell, row
from repulsive.lab.paper.verdicts import NOT_CONFIRMED, NOT_TESTED, Finding, Runs, difference, judge, scaled, values
from repulsive.lab.runs.head_counts import head_counts
from repulsive.lab.systems.registry import open_recipe
from repulsive.metrics.compare import Comparison
from repulsive.pages import write_report
from repulsive.pages.figures.write import write_figures

COUNTS = {"classification": (1, 5, 10, 20, 30, 40), "translation": (1, 2, 4, 8, 16)}
METHODS = ("ma", "svgd")
METRIC = {"classification": "accuracy", "translation": "nll"}  # what the error is made of
ERROR = {"classification": "error (%)", "translation": "NLL"}
ByCount = Mapping[int, Runs]


class HeadFigure:
    """The figure; an artefact as those of `comparison`."""

    id = "heads"
    title = "error against the number of heads"
    source = "Figure 3"
    data = ("yelp", "iwslt14")

    def needs(self, options: Options) -> list[DataSet]:
        return chosen(self.id, self.data, options.datasets)

    def rows(self, options: Options) -> list[RunSet]:
        return [
            runs
            for data in self.needs(options)
            for counts in self.on(data, options).values()
            for runs in counts.values()
        ]

    def on(self, data: DataSet, options: Options) -> dict[str, dict[int, RunSet]]:
        """Method -> number of heads -> runs; the recipe's own number is no change, and its runs are those of tables."""
        hidden = toy.changes(data.kind) if options.toy else ()
        counts = toy.HEADS if options.toy else COUNTS[data.kind]
        recipe = open_recipe(data.recipe("ma"), [*data.changes, *hidden])
        own = int(recipe.model.heads)  # type: ignore[attr-defined]
        return {
            method: {
                count: row(data, method, changes=() if count == own else (f"model.heads={count}",), hidden=hidden)
                for count in counts
            }
            for method in METHODS
        }

    def report(self, options: Options, tell: Tell) -> Report:
        rows: list[Row] = []
        findings: list[Finding] = []
        files: list[Path] = []
        texts: list[str] = []
        found = [look(data, options.data, options.toy, options.changes) for data in self.needs(options)]
        for data, seen in zip(self.needs(options), found, strict=True):
            sets = self.on(data, options)
            folders = [runs.folder(options) for counts in sets.values() for runs in counts.values()]
            content = head_counts(folders, "test", f"How many heads: {data.name}")
            files.append(write_report(options.out / f"{self.id}-{data.name}.html", content))
            figures = write_figures(options.out / "figures" / f"{self.id}-{data.name}", content)
            files += dict.fromkeys(path.parent for path in figures)
            ended = {m: {count: runs.finished(options) for count, runs in counts.items()} for m, counts in sets.items()}
            for method, counts in ended.items():
                for count, runs in counts.items():
                    label, place = f"{LABELS[method]}, {count} heads", sets[method][count].folder(options)
                    rows.append(Row(data.name, method, label, len(runs), _numbers(data, runs), place))
            best = best_count(data, ended["svgd"])
            printed = published().value(self.id, seen.paper, "svgd", "best")
            texts.append(f"{data.name}: SVGD is best with {best} heads by the development set; the paper: {printed:g}.")
            findings += self._findings(data, seen, ended, best)
        return Report(self.id, self.title, self.source, found, rows, findings, texts, files)

    def _findings(self, data: DataSet, seen: Found, ended: Mapping[str, ByCount], best: int) -> list[Finding]:
        found = []
        for given in published().claims(self.id):
            claim = replace(given, data=data.name)
            if given.data != seen.paper:
                continue
            if claim.metric == "error":
                found.append(_shape(claim, data, ended["svgd"], best, seen.other))
            else:
                pairs = [_difference(data, ended["svgd"][count], ended["ma"][count]) for count in ended["svgd"]]
                found.append(judge(claim, least_sure(pairs), seen.other, "not run"))
        return found


def best_count(data: DataSet, counts: ByCount) -> int:
    """The number of heads with the lowest mean error on the development set: chosen there, tested elsewhere."""
    metric, sign = METRIC[data.kind], -1 if METRIC[data.kind] == "accuracy" else 1
    return min(counts, key=lambda count: sign * statistics.fmean(values(counts[count], metric, "dev").values()))


def least_sure(pairs: list[Comparison | None]) -> Comparison | None:
    """Of differences that should all be below zero the one that is least so, with the largest p-value of all."""
    if not pairs or any(pair is None for pair in pairs):
        return None
    known = [pair for pair in pairs if pair is not None]
    worst = max(known, key=lambda pair: pair.high)
    return dataclasses.replace(worst, p_value=max(pair.p_value for pair in known))


def _shape(claim: Claim, data: DataSet, counts: ByCount, best: int, other: str) -> Finding:
    """Is the error at an end of the curve higher than where the development set has it lowest?"""
    end = min(counts) if claim.first == "fewest" else max(counts)
    claim = replace(claim, first=f"{end} heads", second=f"{best} heads")
    if end == best:
        return Finding(claim, NOT_TESTED if other else NOT_CONFIRMED, other or f"dev is best at that end, {end} heads")
    return judge(claim, _difference(data, counts[end], counts[best]), other, "not run")


def _difference(data: DataSet, first: Runs, second: Runs) -> Comparison | None:
    """Error of the first - error of the second."""
    metric = METRIC[data.kind]
    if metric == "nll":
        return difference(first, second, metric)
    seen = difference(first, second, metric)
    return None if seen is None else flipped(seen)


def flipped(seen: Comparison) -> Comparison:
    """The difference of errors from that of accuracies."""
    turned = scaled(seen, -1.0)
    return replace(turned, low=turned.high, high=turned.low)


def _numbers(data: DataSet, runs: Runs) -> dict[str, Number]:
    metric = METRIC[data.kind]
    found = values(runs, metric).values()
    return {ERROR[data.kind]: Number(None, [100 - x if metric == "accuracy" else x for x in found])}
