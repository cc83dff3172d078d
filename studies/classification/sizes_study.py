"""The runs of `paper_sizes` on one dataset: its plan, its stages, and choices from the records so far."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from studies.classification.controls import Control, list_controls
from studies.classification.lean_runs import Job
from studies.classification.search_space import BASELINE, FIRST, FIXED
from studies.classification.sizes_records import Records
from studies.tuning.choices import (
    CONTROL,
    FINAL,
    REFINE,
    REFINE_SEEDS,
    REFINED,
    SCREEN,
    SCREEN_SEEDS,
    mean_losses,
    rank_trials,
)

from repulsive.lab.text.folders import read_folder

STAGES = (SCREEN, REFINE, FINAL)  # CONTROL follows when these have ended for all datasets
SHARE = 0.7  # of the remaining time that the runs after the screening may take: the rest is margin, and other datasets
MARGIN = 1.3  # a run is started if this many times its expected duration is left


@dataclass(frozen=True)
class Plan:
    """Plan for one dataset.

    Args:
        changes: settings of all runs.
        screen: training items of the screening; 0: all.
        sizes: training items to choose from for the other stages, ascending; empty: all.
        seeds: seeds of the final stage.
    """

    changes: tuple[str, ...]
    screen: int = 0
    sizes: tuple[int, ...] = ()
    seeds: int = 10


# Captured graphs are not worth their cost here: the GPU is busy with the steps of the other processes.
SIZES = (
    "model.units=300",
    "training.batch=256",
    "training.precision=bf16",
    "training.capture=false",
    "optimizer.warmup_share=0.1",  # the wide ReLU layer diverges for some steps without it
)
PLANS = {
    "yelp": Plan(
        (*SIZES, "model.hidden=350", "model.mlp=3000", "training.epochs=2"),
        screen=30_000,
        sizes=(30_000, 45_000, 60_000, 75_000, 92_000),
    ),
    "age": Plan((*SIZES, "model.hidden=350", "model.mlp=2000", "training.epochs=8"), seeds=40),
    "snli": Plan(
        (*SIZES, "model.hidden=150", "model.mlp=4000", "model.gate=600", "training.epochs=3"),
        screen=30_000,
        sizes=(30_000, 60_000, 90_000),
    ),
}
TINY = ("model.units=8", "model.hidden=6", "model.heads=3", "model.mlp=10", "model.gate=4", "training.epochs=1")


class Study:
    """All runs on one dataset, in the order in which they become known.

    Args:
        dataset: name of the dataset.
        arguments: of the command line.
        records: finished runs.
        work: folder for runs in progress.
    """

    def __init__(self, dataset: str, arguments: argparse.Namespace, records: Records, work: Path) -> None:
        self.dataset, self.arguments, self.records, self.work = dataset, arguments, records, work
        self.plan, self.arms, self.rows = PLANS[dataset], arguments.arms, 0
        self.items = _training_items(arguments.data / dataset)
        self.epochs = count_epochs(self._changes())
        self._rate = 0, 0.0  # number of records, and the seconds per item that follow from them

    def _changes(self) -> tuple[str, ...]:
        return (*self.plan.changes, *(TINY if self.arguments.tiny else ()), *self.arguments.set)

    def size(self, stage: str) -> int | None:
        """Return the number of training items of a stage; None if it is not decided yet."""
        if self.arguments.tiny:
            return min(self.items, 200)
        if stage == SCREEN:
            return min(self.items, self.plan.screen or self.items)
        return self.records.sizes.get(self.dataset) if self.plan.sizes else self.items

    def decide_size(self, seconds: float, jobs: int) -> None:
        """Choose the largest training size with which all further runs fit, when the screening has ended.

        Args:
            seconds: time left.
            jobs: runs side by side.
        """
        if self.size(REFINE) is not None or not all(self._ranked(SCREEN, arm) for arm in self.arms):
            return
        runs = len(self.arms) * (REFINED * len(REFINE_SEEDS) + self.seeds)
        rate = self.seconds_per_item() * self.epochs
        fitting = [size for size in self.plan.sizes if size * rate * runs / jobs <= SHARE * seconds]
        size = min(self.items, max(fitting, default=self.plan.sizes[0]))
        self.records.add({"dataset": self.dataset, "chosen_size": size, "seconds_left": round(seconds)})
        print(f"{self.dataset}: {size:,} training items in the stages refine and final", flush=True)

    @property
    def seeds(self) -> int:
        return min(self.plan.seeds, self.arguments.seeds or self.plan.seeds)

    def seconds_per_item(self) -> float:
        """Return the mean time per training item and epoch of the runs so far, side by side; 0 without runs."""
        runs = self.records.runs
        if self._rate[0] != len(runs):
            own = [run for run in runs.values() if run["dataset"] == self.dataset and "steps" in run]
            self._rate = len(runs), statistics.fmean(map(_seconds_per_item, own)) if own else 0.0
        return self._rate[1]

    def expected(self, job: Job) -> float:
        """Return the expected duration of a run in seconds, with a margin."""
        return MARGIN * self.seconds_per_item() * job.train * count_epochs(job.changes)

    def pending(self) -> Iterator[Job]:
        """Yield the runs that are determined by the results so far and have no record, the most urgent first."""
        for stage in STAGES:
            for job in self._jobs(stage):
                if job.key not in self.records.runs:
                    yield job

    def _jobs(self, stage: str) -> Iterator[Job]:
        if stage == SCREEN:
            for trial, arm in ((t, a) for t in range(self.arguments.trials) for a in self.arms):
                yield from self._runs(stage, arm, trial, SCREEN_SEEDS)
        elif self.size(stage) is None:
            return
        elif stage == REFINE:
            for arm in self.arms:
                for trial in self.refined(arm):
                    yield from self._runs(stage, arm, trial, REFINE_SEEDS)
        else:
            chosen = {arm: best for arm in self.arms if (best := self.chosen(arm)) is not None}
            for seed in range(self.seeds):
                for arm, trial in chosen.items():
                    yield from self._runs(stage, arm, trial, range(seed, seed + 1))

    def pending_controls(self) -> Iterator[tuple[int, Job]]:
        """Yield rank and run of all controls without a record, for the seeds of plain attention's final runs."""
        chosen = self.all_chosen()
        if BASELINE not in chosen or self.size(CONTROL) is None:
            return
        seeds = self.final_seeds()
        for control in list_controls(self.dataset, chosen, self.epochs):
            for job in self.control_jobs(control, seeds):
                if job.key not in self.records.runs:
                    yield control.rank, job

    def final_seeds(self) -> list[int]:
        """List the seeds of plain attention's final runs."""
        plain = self.records.of(self.dataset, FINAL, BASELINE)
        return sorted(run["seed"] for run in plain if "test" in run and run["seed"] < self.seeds)

    def control_jobs(self, control: Control, seeds: Iterable[int]) -> Iterator[Job]:
        """Yield the runs of a control."""
        point = FIRST.trials(control.recipe, self.arguments.trials)[control.trial]
        yield from self.make_jobs(
            CONTROL,
            control.recipe,
            control.trial,
            (*point, *control.changes),
            seeds,
            name=control.name,
            control_of=control.of,
            force=control.force,
        )

    @property
    def has_final(self) -> bool:
        """Check that plain attention has runs of the final stage, and that all arms have a chosen point."""
        return bool(self.all_chosen() and self.records.of(self.dataset, FINAL, BASELINE))

    def all_chosen(self) -> dict[str, int]:
        """Return arm -> chosen trial; empty until all arms have one."""
        chosen = {arm: trial for arm in self.arms if (trial := self.chosen(arm)) is not None}
        return chosen if len(chosen) == len(self.arms) else {}

    def _runs(self, stage: str, arm: str, trial: int, seeds: Iterable[int]) -> Iterator[Job]:
        return self.make_jobs(stage, arm, trial, FIRST.trials(arm, self.arguments.trials)[trial], seeds)

    def make_jobs(
        self,
        stage: str,
        arm: str,
        trial: int,
        changes: Sequence[str],
        seeds: Iterable[int],
        *,
        name: str = "",
        **more: Any,
    ) -> Iterator[Job]:
        """Yield the runs of an arm in a stage.

        Args:
            stage: name of the stage; its training size must be decided.
            arm: recipe of the arm.
            trial: number of the point.
            changes: `key=value` changes that follow those of the dataset and the arm.
            seeds: random seeds.
            name: name in records, if it differs from the arm's.
            **more: further settings of `Job`.
        """
        size = self.size(stage)
        assert size is not None
        common = (f"data.folder={(self.arguments.data / self.dataset).resolve()}", f"data.share={size / self.items}")
        all_changes = (*common, *self._changes(), *FIXED.get(arm, ()), *changes)
        name = name or arm
        for seed in seeds:
            folder = self.work / "-".join([self.dataset, stage, name, str(trial), str(seed)])
            device, rows = self.arguments.device, self.rows or 16
            yield Job(folder, self.dataset, name, stage, trial, seed, all_changes, size, device, rows, arm, **more)

    def _ranked(self, stage: str, arm: str) -> list[int]:
        """List the trials of a stage by NLL, the best first; empty until the stage has ended."""
        refined = min(REFINED, self.arguments.trials) * len(REFINE_SEEDS)
        wanted = self.arguments.trials * len(SCREEN_SEEDS) if stage == SCREEN else refined
        return rank_trials(self.records.of(self.dataset, stage, arm), wanted)

    def refined(self, arm: str) -> list[int]:
        """List the trials with the lowest NLL in the screening; empty until it has ended."""
        return self._ranked(SCREEN, arm)[:REFINED]

    def chosen(self, arm: str) -> int | None:
        """Return the trial with the lowest mean NLL over the refining seeds; None until they have ended."""
        return next(iter(self._ranked(REFINE, arm)), None)

    def better_than_chosen(self, arm: str, stage: str, wanted: int) -> int | None:
        """Return the best point of a further search if its mean NLL is below that of the arm's chosen trial.

        None until the search has ended, or if the chosen trial is as good. An arm without a chosen trial gets the best.

        Args:
            arm: name of the arm.
            stage: stage of the search, with the seeds of `REFINE`.
            wanted: number of runs of that stage.
        """
        runs, chosen = self.records.of(self.dataset, stage, arm), self.chosen(arm)
        best = next(iter(rank_trials(runs, wanted)), None)
        if best is None or chosen is None:
            return best
        before = mean_losses(self.records.of(self.dataset, REFINE, arm))[chosen]
        return best if mean_losses(runs)[best] < before else None


def count_epochs(changes: Sequence[str]) -> int:
    """Return the number of epochs among `key=value` changes; of repeated keys the last counts."""
    return int(dict(change.split("=", 1) for change in changes)["training.epochs"])


def _seconds_per_item(run: dict[str, Any]) -> float:
    return float(run["seconds"] / run["train"] / count_epochs(run["changes"]))


@cache
def _training_items(folder: Path) -> int:
    return int(read_folder(folder)[1]["rows"]["train"])
