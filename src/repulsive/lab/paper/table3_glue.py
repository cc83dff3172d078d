"""Table 3: ELECTRA pre-trained with and without repulsion, then fine-tuned on the tasks of GLUE."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from repulsive.lab.paper import toy
from repulsive.lab.paper.datasets import DATASETS, Dataset, choose_datasets, inspect_dataset
from repulsive.lab.paper.differences import Runs, difference, over_seeds, values
from repulsive.lab.paper.mismatch import Mismatch, combine
from repulsive.lab.paper.options import Log, Options
from repulsive.lab.paper.published import Claim, published
from repulsive.lab.paper.report import Number, Report, Row
from repulsive.lab.paper.run_sets import RunSet
from repulsive.lab.paper.verdicts import judge
from repulsive.lab.systems.glue.data import TASKS
from repulsive.metrics.compare import Comparison

SYSTEMS = {"ma": "ELECTRA", "svgd": "ELECTRA + RMA"}
RTE_AFTER_MNLI = "rte-mnli"
MEANS = {"mean": False, "mean-mnli": True}  # mean over tasks -> whether its RTE score is the one after MNLI


class GlueTable:
    """Table 3, GLUE scores of pre-trained models; an `Artefact`."""

    id = "table3"
    title = "GLUE after pre-training with and without repulsion"

    @property
    def source(self) -> str:
        return published().source(self.id)

    def tasks(self, options: Options) -> list[Dataset]:
        """List the GLUE tasks to fine-tune on."""
        return choose_datasets(self.id, tuple(TASKS), [name for name in options.datasets if name != "pretrain"])

    def required_datasets(self, options: Options) -> list[Dataset]:
        return [DATASETS["pretrain"], *self.tasks(options)]

    def run_sets(self, options: Options) -> list[RunSet]:
        run_sets = []
        for system in SYSTEMS:
            run_sets += [self.pretraining(system, options), *self.fine_tunings(system, options).values()]
        return run_sets

    def pretraining(self, system: str, options: Options) -> RunSet:
        """Return the single pre-training run of a system, as in the paper; seeds vary the fine-tuning."""
        dataset = DATASETS["pretrain"]
        name = dataset.recipe(system)
        hidden = toy.recipe_changes("electra", options)
        return RunSet(dataset, system, name, name, hidden_changes=hidden, seeds=1)

    def fine_tunings(self, system: str, options: Options) -> dict[str, RunSet]:
        """Return column -> fine-tuning runs of a system."""
        start = self.pretraining(system, options).seed_folders(options)[0]
        hidden = toy.recipe_changes("glue", options)
        columns = {
            task.name: RunSet(
                task,
                system,
                f"glue/{task.name}",
                f"{system}/glue/{task.name}",
                (),
                (f"model.start={start}", *hidden),
                stage=1,
            )
            for task in self.tasks(options)
        }
        if "mnli" in columns and "rte" in columns:
            mnli = columns["mnli"].folder(options) / "seed-{seed}"
            columns[RTE_AFTER_MNLI] = RunSet(
                DATASETS["rte"],
                system,
                f"glue/{RTE_AFTER_MNLI}",
                f"{system}/glue/{RTE_AFTER_MNLI}",
                (),
                (f"model.start={mnli}", *hidden),
                stage=2,
            )
        return columns

    def report(self, options: Options, log: Log) -> Report:
        prepared = [inspect_dataset(dataset, options) for dataset in self.required_datasets(options)]
        mismatches = {data.name: data.mismatch for data in prepared}
        finished = {
            system: {column: runs.finished(options) for column, runs in self.fine_tunings(system, options).items()}
            for system in SYSTEMS
        }
        scores = {system: _with_means(columns) for system, columns in finished.items()}
        rows = []
        for column in scores["ma"]:
            numbers = {
                label: Number(
                    published().value(self.id, "glue", system, column), list(scores[system].get(column, {}).values())
                )
                for system, label in SYSTEMS.items()
            }
            rows.append(Row("glue", column, _title(column), len(scores["ma"][column]), numbers))
        findings = [
            judge(
                claim, _compare(claim, finished, scores), _mismatch(claim.data, mismatches), "not run, or only one seed"
            )
            for claim in published().claims(self.id)
            if claim.data in scores["ma"]
        ]
        return Report(self.id, self.title, self.source, prepared, rows, findings)


def metric_of(column: str) -> str:
    """Return the metric of a column's task."""
    return TASKS["rte" if column == RTE_AFTER_MNLI else column].metric


def _title(column: str) -> str:
    names = {RTE_AFTER_MNLI: "RTE after MNLI", "mean": "mean", "mean-mnli": "mean, RTE after MNLI"}
    return names.get(column) or f"{TASKS[column].folder} ({TASKS[column].metric})"


def _with_means(columns: Mapping[str, Runs]) -> dict[str, dict[int, float]]:
    """Return column -> seed -> score, with the means over the eight tasks if all tasks have finished."""
    scores = {column: values(runs, metric_of(column)) for column, runs in columns.items()}
    for name, after_mnli in MEANS.items():
        tasks = [RTE_AFTER_MNLI if task == "rte" and after_mnli else task for task in TASKS]
        if all(scores.get(task) for task in tasks):
            shared = set.intersection(*(set(scores[task]) for task in tasks))
            scores[name] = {seed: statistics.fmean(scores[task][seed] for task in tasks) for seed in sorted(shared)}
    return scores


def _compare(
    claim: Claim, finished: Mapping[str, Mapping[str, Runs]], scores: Mapping[str, Mapping[str, Mapping[int, float]]]
) -> Comparison | None:
    pair = (claim.first, claim.second)
    if claim.data in MEANS:
        first, second = (scores[system].get(claim.data, {}) for system in pair)
        return over_seeds(first, second)
    first_runs, second_runs = (finished[system][claim.data] for system in pair)
    return difference(first_runs, second_runs, metric_of(claim.data))


def _mismatch(column: str, mismatches: Mapping[str, Mismatch | None]) -> Mismatch | None:
    """Return why a column is not on the paper's data: pre-training or a task uses other data; None if none does."""
    tasks: Sequence[str] = [*TASKS] if column in MEANS else ["rte", "mnli"] if column == RTE_AFTER_MNLI else [column]
    known = {name: mismatches.get(name) for name in ("pretrain", *tasks)}
    return combine(replace(each, reason=f"{name}: {each.reason}") for name, each in known.items() if each)
