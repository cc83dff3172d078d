"""Figure 3: the error against the number of heads."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from repulsive.lab.paper import toy
from repulsive.lab.paper.datasets import Dataset, PreparedData, choose_datasets, inspect_dataset
from repulsive.lab.paper.differences import Runs, difference, scaled, values
from repulsive.lab.paper.mismatch import Mismatch
from repulsive.lab.paper.options import Log, Options
from repulsive.lab.paper.published import Claim, published
from repulsive.lab.paper.report import Number, Report, Row, label_of
from repulsive.lab.paper.result_claims import name_count
from repulsive.lab.paper.run_sets import RunSet, method_runs
from repulsive.lab.paper.verdicts import Finding, judge, judge_unseen
from repulsive.lab.runs.head_counts import head_counts
from repulsive.lab.systems.registry import open_recipe
from repulsive.metrics.compare import Comparison
from repulsive.pages import write_report
from repulsive.pages.figures.write import write_figures

COUNTS = {"classification": (1, 5, 10, 20, 30, 40), "translation": (1, 2, 4, 8, 16)}
METHODS = ("ma", "svgd")
METRIC = {"classification": "accuracy", "translation": "nll"}  # metric from which the error is computed
ERROR = {"classification": "error (%)", "translation": "NLL"}
ByCount = Mapping[int, Runs]


class HeadCounts:
    """Figure 3, the error against the number of heads; an `Artefact`."""

    id = "heads"
    title = "error against the number of heads"
    source = "Figure 3"
    paper_datasets = ("yelp", "iwslt14")

    def required_datasets(self, options: Options) -> list[Dataset]:
        return choose_datasets(self.id, self.paper_datasets, options.datasets)

    def run_sets(self, options: Options) -> list[RunSet]:
        return [
            runs
            for dataset in self.required_datasets(options)
            for counts in self.runs_on(dataset, options).values()
            for runs in counts.values()
        ]

    def runs_on(self, dataset: Dataset, options: Options) -> dict[str, dict[int, RunSet]]:
        """Return method -> number of heads -> runs; at the recipe's own number these are the runs of the tables."""
        hidden = toy.recipe_changes(dataset.kind, options)
        counts = toy.HEADS if options.toy else COUNTS[dataset.kind]
        recipe = open_recipe(dataset.recipe("ma"), hidden)
        default = int(recipe.model.heads)  # type: ignore[attr-defined]
        return {
            method: {
                count: method_runs(
                    dataset,
                    method,
                    changes=() if count == default else (f"model.heads={count}",),
                    hidden_changes=hidden,
                )
                for count in counts
            }
            for method in METHODS
        }

    def report(self, options: Options, log: Log) -> Report:
        rows: list[Row] = []
        findings: list[Finding] = []
        files: list[Path] = []
        texts: list[str] = []
        datasets = self.required_datasets(options)
        prepared = [inspect_dataset(dataset, options) for dataset in datasets]
        for dataset, data in zip(datasets, prepared, strict=True):
            run_sets = self.runs_on(dataset, options)
            folders = [runs.folder(options) for counts in run_sets.values() for runs in counts.values()]
            content = head_counts(folders, "test", f"How many heads: {dataset.name}")
            files.append(write_report(options.out / f"{self.id}-{dataset.name}.html", content))
            figures = write_figures(options.out / "figures" / f"{self.id}-{dataset.name}", content)
            files += dict.fromkeys(path.parent for path in figures)
            finished = {
                method: {count: runs.finished(options) for count, runs in counts.items()}
                for method, counts in run_sets.items()
            }
            for method, counts in finished.items():
                for count, runs in counts.items():
                    label, folder = f"{label_of(method)}, {name_count(count)}", run_sets[method][count].folder(options)
                    rows.append(Row(dataset.name, method, label, len(runs), _numbers(dataset, runs), folder))
            best = best_count(dataset, finished["svgd"])
            ours, printed = name_count(best), published().value(self.id, data.paper_name, "svgd", "best")
            texts.append(f"{dataset.name}: on the development set SVGD is best with {ours}, in the paper {printed:g}.")
            findings += self._findings(dataset, data, finished, best)
        return Report(self.id, self.title, self.source, prepared, rows, findings, texts, files)

    def _findings(
        self, dataset: Dataset, data: PreparedData, finished: Mapping[str, ByCount], best: int
    ) -> list[Finding]:
        findings = []
        for printed in published().claims(self.id):
            if printed.data != data.paper_name:
                continue
            claim = replace(printed, data=dataset.name)
            if claim.metric == "error":
                findings.append(_judge_shape(claim, dataset, finished["svgd"], best, data.mismatch))
            else:
                counts = finished["svgd"]
                pairs = [_error_difference(dataset, counts[count], finished["ma"][count]) for count in counts]
                findings.append(judge(claim, least_certain(pairs), data.mismatch, "not run"))
        return findings


def best_count(dataset: Dataset, counts: ByCount) -> int:
    """Choose the number of heads with the lowest mean error on the development set."""
    metric, sign = METRIC[dataset.kind], -1 if METRIC[dataset.kind] == "accuracy" else 1
    return min(counts, key=lambda count: sign * statistics.fmean(values(counts[count], metric, "dev").values()))


def least_certain(pairs: list[Comparison | None]) -> Comparison | None:
    """Combine differences that are all claimed to be negative: take the one with the highest end, and the largest p."""
    known = [pair for pair in pairs if pair is not None]
    if not known or len(known) < len(pairs):
        return None
    worst = max(known, key=lambda pair: pair.high)
    return dataclasses.replace(worst, p_value=max(pair.p_value for pair in known))


def _judge_shape(claim: Claim, dataset: Dataset, counts: ByCount, best: int, mismatch: Mismatch | None) -> Finding:
    """Judge whether the error at one end of the curve is higher than at the best number of heads."""
    end = min(counts) if claim.first == "fewest" else max(counts)
    claim = replace(claim, first=name_count(end), second=name_count(best))
    if end == best:
        reason = f"on the development set the best is {name_count(end)}, at that end of the curve"
        return judge_unseen(claim, mismatch, reason)
    return judge(claim, _error_difference(dataset, counts[end], counts[best]), mismatch, "not run")


def _error_difference(dataset: Dataset, first: Runs, second: Runs) -> Comparison | None:
    """Compare the errors of two sets of runs: error of the first - error of the second."""
    metric = METRIC[dataset.kind]
    comparison = difference(first, second, metric)
    return comparison if comparison is None or metric == "nll" else negated(comparison)


def negated(comparison: Comparison) -> Comparison:
    """Turn a difference of accuracies into a difference of errors."""
    result = scaled(comparison, -1.0)
    return replace(result, low=result.high, high=result.low)


def _numbers(dataset: Dataset, runs: Runs) -> dict[str, Number]:
    metric = METRIC[dataset.kind]
    by_seed = values(runs, metric).values()
    return {ERROR[dataset.kind]: Number(None, [100 - x if metric == "accuracy" else x for x in by_seed])}
