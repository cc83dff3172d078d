"""Tables that compare methods trained on the same data: 1, 2 and 4, and those of the appendix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from repulsive.errors import ConfigError
from repulsive.lab.paper import toy
from repulsive.lab.paper.datasets import DATASETS, DataSet, chosen, look
from repulsive.lab.paper.outcome import LABELS, Number, Report, Row
from repulsive.lab.paper.published import Claim, published
from repulsive.lab.paper.running import Options, RunSet, Tell, row
from repulsive.lab.paper.times import Ratio, step_times
from repulsive.lab.paper.verdicts import Finding, Runs, difference, judge, values
from repulsive.metrics.compare import Comparison

Method = tuple[str, tuple[str, ...]]  # last word of the recipe, and `key=value` changes


@dataclass(frozen=True)
class ComparisonTable:
    """A table of methods.

    Args:
        id: of the table.
        title: what it compares.
        data: the paper's data sets.
        methods: rows; the first is the baseline, which is always trained.
        metrics: columns, by the kind of the data.
        timed: row -> variant of the bench, for the times of a step.
    """

    id: str
    title: str
    data: tuple[str, ...]
    methods: Mapping[str, Method]
    metrics: Mapping[str, tuple[str, ...]]
    timed: Mapping[str, str] = field(default_factory=dict)

    @property
    def source(self) -> str:
        return published().source(self.id)

    def needs(self, options: Options) -> list[DataSet]:
        """The data sets."""
        return chosen(self.id, self.data, options.datasets)

    def rows(self, options: Options) -> list[RunSet]:
        """All runs."""
        return [each for data in self.needs(options) for each in self.on(data, options).values()]

    def on(self, data: DataSet, options: Options) -> dict[str, RunSet]:
        """Method -> its runs on a data set."""
        hidden = toy.changes(data.kind) if options.toy else ()
        return {
            name: row(data, name, recipe, changes, hidden) for name, (recipe, changes) in self.wanted(options).items()
        }

    def wanted(self, options: Options) -> dict[str, Method]:
        """The methods that are asked for.

        Raises:
            ConfigError: none of `--methods` is a row of this table.
        """
        first = next(iter(self.methods))
        if options.methods and not any(name in self.methods for name in options.methods):
            raise ConfigError(f"{self.id}: --methods {', '.join(options.methods)}: it has {', '.join(self.methods)}")
        return {
            name: method
            for name, method in self.methods.items()
            if not options.methods or name == first or name in options.methods
        }

    def report(self, options: Options, tell: Tell) -> Report:
        """The table, from runs that have ended."""
        times = self._times(options, tell)
        found = [look(data, options.data, options.toy, options.changes) for data in self.needs(options)]
        rows, findings = [], []
        for seen in found:
            data = DATASETS[seen.name]
            sets = self.on(data, options)
            ended = {name: runs.finished(options) for name, runs in sets.items()}
            timed = times if seen.paper == self.data[0] else {}
            for name, runs in ended.items():
                numbers = self._numbers(data, name, runs) | self._time(seen.paper, name, timed)
                place = sets[name].folder(options)
                rows.append(Row(seen.name, name, LABELS.get(name, name), len(runs), numbers, place))
            for claim in published().claims(self.id):
                if claim.data == seen.paper and claim.metric != "time":
                    findings.append(_found(replace(claim, data=seen.name), ended, seen.other))
                elif claim.data == seen.paper:
                    findings.append(_time_claim(replace(claim, data=seen.name), timed, self.timed, options.toy))
        return Report(self.id, self.title, self.source, found, rows, findings)

    def _numbers(self, data: DataSet, name: str, runs: Runs) -> dict[str, Number]:
        return {
            metric: Number(published().value(self.id, data.paper, name, metric), list(values(runs, metric).values()))
            for metric in self.metrics[data.kind]
        }

    def _times(self, options: Options, tell: Tell) -> dict[str, Ratio]:
        if not self.timed or not options.times:
            return {}
        return step_times([variant for variant in self.timed.values() if variant != "MA"], options, tell)

    def _time(self, paper: str, name: str, times: Mapping[str, Ratio]) -> dict[str, Number]:
        printed = published().value(self.id, paper, name, "time")
        ratio = times.get(self.timed.get(name, ""))
        if ratio is None:
            return {} if printed is None else {"time": Number(printed)}
        return {"time": Number(printed, [ratio.ratio], (ratio.low, ratio.high))}


def _found(claim: Claim, ended: Mapping[str, Runs], other: str) -> Finding:
    lacking = [LABELS.get(name, name) for name in (claim.first, claim.second) if not ended.get(name)]
    if lacking:
        return judge(claim, None, other, f"{' and '.join(lacking)} not run")
    seen = difference(ended[claim.first], ended[claim.second], claim.metric)
    return judge(claim, seen, other, f"{claim.metric} not measured, or one seed only")


def _time_claim(claim: Claim, times: Mapping[str, Ratio], variants: Mapping[str, str], is_toy: bool) -> Finding:
    """Ratios were measured side by side: the interval of their difference is taken as wide as the two make it."""
    first, second = (times.get(variants.get(name, "")) for name in (claim.first, claim.second))
    if first is None or second is None:
        return judge(claim, None, "", "times were not measured")
    seen = Comparison(
        first.ratio - second.ratio, first.low - second.high, first.high - second.low, float("nan"), "rounds", 2, 0
    )
    return judge(claim, seen, "toy size" if is_toy else "")


_CLASSES: dict[str, tuple[str, ...]] = {"classification": ("accuracy", "dist"), "translation": ("bleu", "sacrebleu")}
_ACCURACY: dict[str, tuple[str, ...]] = {"classification": ("accuracy",), "translation": ("bleu",)}
_GRAPHS = (
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


def _plain(*names: str) -> dict[str, Method]:
    return {name: (name, ()) for name in names}


def _modules() -> dict[str, Method]:
    parts = {name: ("svgd", (f"method.parts={name}",)) for name in ("q", "k", "v")}
    places = {name: ("svgd", (f"method.where={name}",)) for name in ("encoder", "decoder", "cross")}
    layers = {name: ("svgd", (f"method.layers={name}",)) for name in ("first", "last")}
    return {"ma": ("ma", ()), **parts, **places, **layers, "svgd": ("svgd", ())}


_SENTENCES = ("age", "yelp", "snli")
TABLES: Sequence[ComparisonTable] = (
    ComparisonTable(
        "table1",
        "sentence classification: accuracy and distance between heads",
        _SENTENCES,
        _plain("ma", "frobenius", "svgd", "spos"),
        _CLASSES,
    ),
    ComparisonTable(
        "table2",
        "translation: BLEU and time of a step",
        ("iwslt14", "wmt14"),
        _plain("ma", "disagreement", "svgd"),
        _CLASSES,
        {"ma": "MA", "disagreement": "disagreement", "svgd": "all layers"},
    ),
    ComparisonTable(
        "table4",
        "texts from graphs: BLEU, METEOR, ROUGE, coverage",
        ("agenda",),
        _plain("gw", "cosine", "rma"),
        {"graphs": _GRAPHS},
    ),
    ComparisonTable(
        "sgld",
        "repulsion against noise alone",
        (*_SENTENCES, "iwslt14"),
        _plain("ma", "sgld", "svgd"),
        _ACCURACY,
    ),
    ComparisonTable("priors", "uniform against Gaussian prior", _SENTENCES, _plain("svgd", "gaussian"), _ACCURACY),
    ComparisonTable(
        "modules",
        "which attention is made repulsive",
        ("iwslt14",),
        _modules(),
        _ACCURACY,
        {"ma": "MA", "first": "first layer", "svgd": "all layers"},
    ),
    ComparisonTable(
        "cosine",
        "from a regulariser to the framework in three rungs",
        ("age", "yelp"),
        _plain("cosine-regulariser", "cosine-derivative", "cosine-smoothing"),
        _ACCURACY,
    ),
)
