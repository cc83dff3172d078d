"""The runs of one system: its stages, and choices from the records so far."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.altered_forces import ATTRACTION, WRONG_PARTNER
from studies.budget.systems import TINY, Arm, System
from studies.budget.training import Job
from studies.tuning import records
from studies.tuning.choices import CONTROL, FINAL, REFINE, REFINE_SEEDS, SCREEN, SCREEN_SEEDS, rank_trials
from studies.tuning.seed_differences import difference_of

from repulsive.errors import RunError

STAGES = (SCREEN, REFINE, FINAL, CONTROL)
CONTROLS = 3  # of an arm: plain attention with its settings, attraction, wrong partner
DECIDING = ("nll", "bleu")  # an arm that is significantly better in one of them gets controls
SHARE = 0.85  # of the remaining time that the runs after the screening may take; the rest is margin
MARGIN = 1.3  # a run is started if this many times its expected duration is left


class Records(records.Records):
    """Records of one system, with its settings and the number of epochs that was chosen.

    Args:
        out: folder of the file.
    """

    def __init__(self, out: Path) -> None:
        self.settings: dict[str, Any] = {}
        self.epochs: int | None = None
        super().__init__(out)

    def _take(self, line: dict[str, Any]) -> None:
        if "settings" in line:
            self.settings = line["settings"]
        elif "chosen_epochs" in line:
            self.epochs = line["chosen_epochs"]
        else:
            super()._take(line)

    def check_settings(self, settings: dict[str, Any]) -> None:
        """Store the settings of a new study; raise if the records were made with others."""
        if not self.settings:
            self.add({"settings": settings})
        changed = [name for name, value in settings.items() if self.settings.get(name) != value]
        if changed:
            raise RunError(f"{self.out}: its runs were trained with another {', '.join(changed)}; choose another --out")

    def test_values(self, dataset: str, stage: str, arm: str, metric: str) -> dict[int, float]:
        """Return seed -> metric on the test set of an arm's runs."""
        runs = [run for run in self.of(dataset, stage, arm) if metric in run.get("test", ())]
        return {run["seed"]: run["test"][metric] for run in runs}


@dataclass(frozen=True)
class Control:
    """A control of an arm that is better than plain attention.

    Args:
        name: name in records and tables.
        arm: arm whose recipe is trained.
        of: arm that is compared with it, whose point it uses.
        force: altered force, see `studies.altered_forces`.
    """

    name: str
    arm: str
    of: str
    force: str = ""


class Study:
    """All runs of one system, in the order in which they become known.

    Args:
        system: the system.
        arguments: of the command line.
        records: finished runs.
        work: folder for runs in progress.
    """

    def __init__(self, system: System, arguments: argparse.Namespace, records: Records, work: Path) -> None:
        self.system, self.arguments, self.records, self.work = system, arguments, records, work
        self.arms: dict[str, Arm] = {name: arm for name, arm in system.arms.items() if name in arguments.arms}
        self.trials = arguments.trials or system.trials
        self.refined = min(system.refined, self.trials)
        self.seeds = arguments.seeds or system.seeds
        self.lengths = TINY if arguments.tiny else system.lengths
        self.changes = (*system.changes, *(system.tiny if arguments.tiny else ()), *arguments.set)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that all records of a study share."""
        own = {"trials": self.trials, "refined": self.refined, "screen_epochs": self.lengths.screen}
        return own | {"changes": records.without_data(self.changes), "tiny": self.arguments.tiny}

    # -- duration ---------------------------------------------------------------------------------------------------

    def epochs(self, stage: str) -> int | None:
        """Return the epochs of a stage; None if they are not decided yet."""
        return self.lengths.screen if stage == SCREEN else self.records.epochs

    def decide_epochs(self, seconds: float, jobs: int) -> None:
        """Choose the longest training with which all further runs fit, when the screening has ended.

        Args:
            seconds: time left.
            jobs: runs side by side.
        """
        if self.records.epochs is None and all(self.ranked(SCREEN, arm) for arm in self.arms):
            epochs = self.arguments.epochs or self.fitting_epochs(seconds, jobs)
            self.records.add({"chosen_epochs": epochs, "seconds_left": round(seconds), "jobs": jobs})
            print(f"{epochs} epochs in the stages after {SCREEN}", flush=True)

    def fitting_epochs(self, seconds: float, jobs: int) -> int:
        """Return the largest number of epochs with which all runs after the screening fit into some seconds."""
        runs = sum(self.count_runs(stage) for stage in STAGES[1:])
        lengths = [n for n in self.lengths.later if runs * self.run_seconds(n, jobs) / jobs <= SHARE * seconds]
        return max(lengths, default=self.lengths.later[0])

    def count_runs(self, stage: str) -> int:
        """Return the number of runs of a stage; of the controls the number for one arm."""
        of_an_arm = {SCREEN: self.trials * len(SCREEN_SEEDS), REFINE: self.refined * len(REFINE_SEEDS)}
        return CONTROLS * self.seeds if stage == CONTROL else len(self.arms) * of_an_arm.get(stage, self.seeds)

    def run_seconds(self, epochs: int, jobs: int) -> float:
        """Return the expected duration of a run side by side with others, from the runs so far if there are any."""
        timed = [run for run in self.records.runs.values() if "epoch_seconds" in run]
        if not timed:
            return self.system.start_seconds + epochs * self.system.epoch_seconds * jobs
        epoch = statistics.fmean(run["epoch_seconds"] for run in timed)
        start = statistics.fmean(run["seconds"] - run["epochs"] * run["epoch_seconds"] for run in timed)
        return max(0.0, start) + epochs * epoch

    def expected(self, job: Job, jobs: int) -> float:
        """Return the expected duration of a run with a margin; 0 before any run has ended."""
        return MARGIN * self.run_seconds(job.epochs, jobs) if self.records.runs else 0.0

    # -- runs -------------------------------------------------------------------------------------------------------

    def pending(self) -> Iterator[Job]:
        """Yield the runs that are determined by the results so far and have no record, the most urgent first."""
        for stage in STAGES:
            for job in self._jobs(stage):
                if job.key not in self.records.runs:
                    yield job

    def _jobs(self, stage: str) -> Iterator[Job]:
        if self.epochs(stage) is None:
            return
        if stage == SCREEN:
            for trial in range(self.trials):
                for arm in self.arms:
                    yield from self._runs(stage, arm, trial, SCREEN_SEEDS)
        elif stage == REFINE:
            for arm in self.arms:
                for trial in self.ranked(SCREEN, arm)[: self.refined]:
                    yield from self._runs(stage, arm, trial, REFINE_SEEDS)
        elif stage == FINAL:
            for seed in range(self.seeds):
                for arm, trial in self.chosen().items():
                    yield from self._runs(stage, arm, trial, [seed])
        else:
            controls = self.controls()
            for seed in range(self.seeds):
                for control in controls:
                    yield from self._runs(stage, control.arm, self.chosen()[control.of], [seed], control)

    def _runs(
        self, stage: str, arm: str, trial: int, seeds: Sequence[int], control: Control | None = None
    ) -> Iterator[Job]:
        arguments, dataset, method = self.arguments, self.system.dataset, self.arms[arm]
        name, label = (control.name, control.name) if control else (arm, method.label)
        point = self.system.space.trials(arm, self.trials)[trial]
        data = f"data.folder={(arguments.data / dataset).resolve()}"
        epochs = self.epochs(stage)
        assert epochs is not None
        for seed in seeds:
            yield Job(
                self.work / "-".join([stage, name, str(trial), str(seed)]),
                dataset,
                stage,
                name,
                trial,
                seed,
                f"{dataset}/{method.recipe}",
                label,
                (data, *self.changes, *method.changes, *point),
                epochs,
                arguments.device,
                control.of if control else "",
                control.force if control else "",
            )

    # -- choices ----------------------------------------------------------------------------------------------------

    def ranked(self, stage: str, arm: str) -> list[int]:
        """List the trials of an arm by NLL, the best first; empty until the stage has ended."""
        wanted = self.count_runs(stage) // len(self.arms)
        return rank_trials(self.records.of(self.system.dataset, stage, arm), wanted)

    def chosen(self) -> dict[str, int]:
        """Return arm -> the trial with the lowest mean NLL over the refining seeds, of arms that have ended."""
        ranked = {arm: self.ranked(REFINE, arm) for arm in self.arms}
        return {arm: trials[0] for arm, trials in ranked.items() if trials}

    @property
    def has_ended(self) -> bool:
        """Check that all final runs have ended."""
        runs = [len(self.records.of(self.system.dataset, FINAL, arm)) for arm in self.arms]
        return min(runs) >= self.seeds

    def controls(self) -> list[Control]:
        """List the controls of arms that are significantly better than plain attention; empty until all have ended."""
        system, chosen, controls = self.system, self.chosen(), list[Control]()
        if not self.has_ended:
            return []
        for arm, method in self.arms.items():
            if not self.beats_plain(arm):
                continue
            if chosen[arm] != chosen[system.baseline]:
                controls.append(Control(f"{system.baseline}@{arm}", system.baseline, arm))
            if method.has_force:
                controls += [Control(f"{arm}, {force}", arm, arm, force) for force in (ATTRACTION, WRONG_PARTNER)]
        return controls

    def beats_plain(self, arm: str) -> bool:
        """Check that an arm is significantly better than plain attention on the test set, in NLL or BLEU."""
        if arm == self.system.baseline:
            return False
        for metric in DECIDING:
            ours, plain = (
                self.records.test_values(self.system.dataset, FINAL, name, metric)
                for name in (arm, self.system.baseline)
            )
            gap = difference_of(ours, plain)
            if (gap["low"] > 0) if self.system.shown[metric].sign > 0 else (gap["high"] < 0):
                return True
        return False
