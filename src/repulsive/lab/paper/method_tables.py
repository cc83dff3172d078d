"""Tables that compare methods trained on the same data: Tables 1, 2 and 4, and those of Appendix C."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from repulsive.errors import ConfigError
from repulsive.lab.paper import toy
from repulsive.lab.paper.datasets import DATASETS, Dataset, choose_datasets, inspect_dataset
from repulsive.lab.paper.differences import Runs, difference, values
from repulsive.lab.paper.mismatch import Mismatch
from repulsive.lab.paper.options import Log, Options
from repulsive.lab.paper.published import Claim, published
from repulsive.lab.paper.report import Number, Report, Row, label_of
from repulsive.lab.paper.run_sets import RunSet, method_runs
from repulsive.lab.paper.step_times import TimeRatio, step_times
from repulsive.lab.paper.verdicts import Finding, judge
from repulsive.metrics.compare import Comparison

Method = tuple[str, tuple[str, ...]]  # last part of the recipe's name, and `key=value` changes


@dataclass(frozen=True)
class MethodTable:
    """A table of methods; an `Artefact`.

    Args:
        id: id of the table.
        title: title of the table.
        paper_datasets: names of the paper's datasets.
        methods: rows; the first is the baseline, which is always trained.
        metrics: columns, by the kind of the dataset.
        timed: row -> variant of the benchmark that measures its step time.
    """

    id: str
    title: str
    paper_datasets: tuple[str, ...]
    methods: Mapping[str, Method]
    metrics: Mapping[str, tuple[str, ...]]
    timed: Mapping[str, str] = field(default_factory=dict)

    @property
    def source(self) -> str:
        return published().source(self.id)

    def required_datasets(self, options: Options) -> list[Dataset]:
        return choose_datasets(self.id, self.paper_datasets, options.datasets)

    def run_sets(self, options: Options) -> list[RunSet]:
        return [runs for dataset in self.required_datasets(options) for runs in self.runs_on(dataset, options).values()]

    def runs_on(self, dataset: Dataset, options: Options) -> dict[str, RunSet]:
        """Return method -> its runs on a dataset."""
        hidden = toy.recipe_changes(dataset.kind, options)
        return {
            name: method_runs(dataset, name, recipe, changes, hidden)
            for name, (recipe, changes) in self.selected_methods(options).items()
        }

    def selected_methods(self, options: Options) -> dict[str, Method]:
        """Return the baseline and the methods given by `--methods`.

        Raises:
            ConfigError: none of `--methods` is a row of this table.
        """
        first = next(iter(self.methods))
        if options.methods and not any(name in self.methods for name in options.methods):
            raise ConfigError(
                f"{self.id}: no row named {', '.join(options.methods)}; choose --methods from {', '.join(self.methods)}"
            )
        return {
            name: method
            for name, method in self.methods.items()
            if not options.methods or name == first or name in options.methods
        }

    def report(self, options: Options, log: Log) -> Report:
        all_times = self._measure_times(options, log)
        prepared = [inspect_dataset(data, options) for data in self.required_datasets(options)]
        rows, findings = [], []
        for data in prepared:
            dataset = DATASETS[data.name]
            run_sets = self.runs_on(dataset, options)
            finished = {name: runs.finished(options) for name, runs in run_sets.items()}
            times = all_times if data.paper_name == self.paper_datasets[0] else {}
            for name, runs in finished.items():
                numbers = self._numbers(dataset, name, runs) | self._time(data.paper_name, name, times)
                folder = run_sets[name].folder(options)
                rows.append(Row(data.name, name, label_of(name), len(runs), numbers, folder))
            for claim in published().claims(self.id):
                if claim.data != data.paper_name:
                    continue
                here = replace(claim, data=data.name)
                if claim.metric == "time":
                    findings.append(_judge_time(here, times, self.timed, is_toy=options.toy))
                else:
                    findings.append(_judge_metric(here, finished, data.mismatch))
        return Report(self.id, self.title, self.source, prepared, rows, findings)

    def _numbers(self, dataset: Dataset, name: str, runs: Runs) -> dict[str, Number]:
        return {
            metric: Number(
                published().value(self.id, dataset.paper_name, name, metric), list(values(runs, metric).values())
            )
            for metric in self.metrics[dataset.kind]
        }

    def _measure_times(self, options: Options, log: Log) -> dict[str, TimeRatio]:
        if not self.timed or not options.times:
            return {}
        return step_times([variant for variant in self.timed.values() if variant != "MA"], options, log)

    def _time(self, paper_name: str, name: str, times: Mapping[str, TimeRatio]) -> dict[str, Number]:
        printed = published().value(self.id, paper_name, name, "time")
        measured = times.get(self.timed.get(name, ""))
        if measured is None:
            return {} if printed is None else {"time": Number(printed)}
        return {"time": Number(printed, [measured.ratio], (measured.low, measured.high))}


def _judge_metric(claim: Claim, finished: Mapping[str, Runs], mismatch: Mismatch | None) -> Finding:
    missing = [label_of(name) for name in (claim.first, claim.second) if not finished.get(name)]
    if missing:
        return judge(claim, None, mismatch, f"{' and '.join(missing)} not run")
    comparison = difference(finished[claim.first], finished[claim.second], claim.metric)
    return judge(claim, comparison, mismatch, f"{claim.metric} not measured, or only one seed")


def _judge_time(claim: Claim, times: Mapping[str, TimeRatio], variants: Mapping[str, str], *, is_toy: bool) -> Finding:
    """Judge a claim about step times; the interval of the difference is the widest that the two intervals allow."""
    first, second = (times.get(variants.get(name, "")) for name in (claim.first, claim.second))
    if first is None or second is None:
        return judge(claim, None, None, "times were not measured")
    comparison = Comparison(
        first.ratio - second.ratio, first.low - second.high, first.high - second.low, float("nan"), "rounds", 2, 0
    )
    return judge(claim, comparison, Mismatch("toy size") if is_toy else None)


_ALL_METRICS: dict[str, tuple[str, ...]] = {
    "classification": ("accuracy", "dist"),
    "translation": ("bleu", "sacrebleu"),
}
_MAIN_METRIC: dict[str, tuple[str, ...]] = {"classification": ("accuracy",), "translation": ("bleu",)}
_GRAPH_METRICS = (
    "BLEU-1",
    "BLEU-2",
    "BLEU-3",
    "bleu",
    "METEOR",
    "ROUGE-1",
    "ROUGE-2",
    "ROUGE-L",
    "entity coverage",
    "repeated clauses",
)


def _unchanged(*names: str) -> dict[str, Method]:
    """Return methods whose recipes have the same names, without changes."""
    return {name: (name, ()) for name in names}


def _modules() -> dict[str, Method]:
    parts = {name: ("svgd", (f"method.parts={name}",)) for name in ("q", "k", "v")}
    places = {name: ("svgd", (f"method.where={name}",)) for name in ("encoder", "decoder", "cross")}
    layers = {name: ("svgd", (f"method.layers={name}",)) for name in ("first", "last")}
    return {"ma": ("ma", ()), **parts, **places, **layers, "svgd": ("svgd", ())}


_SENTENCES = ("age", "yelp", "snli")
TABLES: Sequence[MethodTable] = (
    MethodTable(
        "table1",
        "sentence classification: accuracy and distance between heads",
        _SENTENCES,
        _unchanged("ma", "frobenius", "svgd", "spos"),
        _ALL_METRICS,
    ),
    MethodTable(
        "table2",
        "translation: BLEU and step time",
        ("iwslt14", "wmt14"),
        _unchanged("ma", "disagreement", "svgd"),
        _ALL_METRICS,
        {"ma": "MA", "disagreement": "disagreement", "svgd": "all layers"},
    ),
    MethodTable(
        "table4",
        "graph-to-text generation: BLEU, METEOR, ROUGE, coverage",
        ("agenda",),
        _unchanged("gw", "cosine", "rma"),
        {"graphs": _GRAPH_METRICS},
    ),
    MethodTable(
        "sgld",
        "repulsion compared with noise alone",
        (*_SENTENCES, "iwslt14"),
        _unchanged("ma", "sgld", "svgd", "sgld-tempered", "spos-tempered"),  # the last two are ours, not the paper's
        _MAIN_METRIC,
    ),
    MethodTable("priors", "uniform and Gaussian prior", _SENTENCES, _unchanged("svgd", "gaussian"), _MAIN_METRIC),
    MethodTable(
        "modules",
        "which attention modules repel",
        ("iwslt14",),
        _modules(),
        _MAIN_METRIC,
        {"ma": "MA", "first": "first layer", "svgd": "all layers"},
    ),
    MethodTable(
        "cosine",
        "from a cosine regularizer to the full rule in three steps",
        ("age", "yelp"),
        _unchanged("cosine-regulariser", "cosine-derivative", "cosine-smoothing"),
        _MAIN_METRIC,
    ),
)
