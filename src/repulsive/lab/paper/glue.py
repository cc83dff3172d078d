"""Table 3: ELECTRA pre-trained with and without repulsion, then fine-tuned on the tasks of GLUE."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from repulsive.lab.paper import toy
from repulsive.lab.paper.datasets import DATASETS, DataSet, chosen, look
from repulsive.lab.paper.outcome import Number, Report, Row
from repulsive.lab.paper.published import Claim, published
from repulsive.lab.paper.running import Options, RunSet, Tell
from repulsive.lab.paper.verdicts import Runs, difference, judge, over_seeds, values
from repulsive.lab.systems.glue.data import TASKS
from repulsive.metrics.compare import Comparison

SYSTEMS = {"ma": "ELECTRA", "svgd": "ELECTRA + RMA"}
AFTER = "rte-mnli"  # RTE after training on MNLI
MEANS = {"mean": False, "mean-mnli": True}  # with RTE after MNLI?


class GlueTable:
    """The table; an artefact as those of `comparison`."""

    id = "table3"
    title = "GLUE after pre-training with and without repulsion"

    @property
    def source(self) -> str:
        return published().source(self.id)

    def tasks(self, options: Options) -> list[DataSet]:
        """Those that are asked for."""
        return chosen(self.id, tuple(TASKS), [name for name in options.datasets if name != "pretrain"])

    def needs(self, options: Options) -> list[DataSet]:
        return [DATASETS["pretrain"], *self.tasks(options)]

    def rows(self, options: Options) -> list[RunSet]:
        found = []
        for system in SYSTEMS:
            start = self.pretraining(system, options)
            found += [start, *self.on(system, options).values()]
        return found

    def pretraining(self, system: str, options: Options) -> RunSet:
        """One run, as in the paper: what varies is the fine-tuning."""
        data = DATASETS["pretrain"]
        name = data.recipe(system)
        return RunSet(data, system, name, name, hidden=_toy("electra", options), seeds=1)

    def on(self, system: str, options: Options) -> dict[str, RunSet]:
        """Column -> the runs of a system."""
        start = self.pretraining(system, options).places(options)[0]
        hidden = _toy("glue", options)
        found = {
            data.name: RunSet(
                data,
                system,
                f"glue/{data.name}",
                f"{system}/glue/{data.name}",
                (),
                (f"model.start={start}", *hidden),
                stage=1,
            )
            for data in self.tasks(options)
        }
        if "mnli" in found and "rte" in found:
            before = found["mnli"].folder(options) / "seed-{seed}"
            found[AFTER] = RunSet(
                DATASETS["rte"],
                system,
                f"glue/{AFTER}",
                f"{system}/glue/{AFTER}",
                (),
                (f"model.start={before}", *hidden),
                stage=2,
            )
        return found

    def report(self, options: Options, tell: Tell) -> Report:
        found = [look(data, options.data, options.toy, options.changes) for data in self.needs(options)]
        others = {each.name: each.other for each in found}
        ended = {s: {c: runs.finished(options) for c, runs in self.on(s, options).items()} for s in SYSTEMS}
        scores = {system: _with_means(columns) for system, columns in ended.items()}
        rows = []
        for column in scores["ma"]:
            numbers = {
                label: Number(
                    published().value(self.id, "glue", system, column), list(scores[system].get(column, {}).values())
                )
                for system, label in SYSTEMS.items()
            }
            rows.append(Row("glue", column, _title(column), len(scores["ma"][column]), numbers))
        findings = []
        for claim in published().claims(self.id):
            if claim.data in scores["ma"]:
                other = _other(claim.data, others)
                findings.append(judge(claim, _seen(claim, ended, scores), other, "not run, or one seed only"))
        return Report(self.id, self.title, self.source, found, rows, findings)


def metric_of(column: str) -> str:
    """The task's own metric."""
    return TASKS["rte" if column == AFTER else column].metric


def _title(column: str) -> str:
    names = {AFTER: "RTE after MNLI", "mean": "mean", "mean-mnli": "mean, RTE after MNLI"}
    return names.get(column) or f"{TASKS[column].folder} ({TASKS[column].metric})"


def _with_means(columns: Mapping[str, Runs]) -> dict[str, dict[int, float]]:
    """Column -> seed -> score, and the means over all eight tasks where they are all there."""
    found = {column: values(runs, metric_of(column)) for column, runs in columns.items()}
    for name, after in MEANS.items():
        wanted = [AFTER if task == "rte" and after else task for task in TASKS]
        if all(found.get(column) for column in wanted):
            shared = set.intersection(*(set(found[column]) for column in wanted))
            found[name] = {seed: statistics.fmean(found[column][seed] for column in wanted) for seed in sorted(shared)}
    return found


def _seen(
    claim: Claim, ended: Mapping[str, Mapping[str, Runs]], scores: Mapping[str, Mapping[str, Mapping[int, float]]]
) -> Comparison | None:
    pair = (claim.first, claim.second)
    if claim.data in MEANS:
        first, second = (scores[system].get(claim.data, {}) for system in pair)
        return over_seeds(first, second)
    first_runs, second_runs = (ended[system][claim.data] for system in pair)
    return difference(first_runs, second_runs, metric_of(claim.data))


def _other(column: str, others: Mapping[str, str]) -> str:
    """Why a column is not the paper's: its task's data, or what was pre-trained on."""
    tasks: Sequence[str] = list(TASKS) if column in MEANS else ["rte", "mnli"] if column == AFTER else [column]
    told = [f"{name}: {others[name]}" for name in ("pretrain", *tasks) if others.get(name)]
    return told[0] if told else ""


def _toy(kind: str, options: Options) -> tuple[str, ...]:
    return toy.changes(kind) if options.toy else ()
