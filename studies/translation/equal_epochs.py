"""Train runs side by side so that all have done the same number of updates whenever they are stopped.

A `Gate` is a file that says how many epochs the runs may train. After every epoch a run waits until it may train
another one, or, if the gate is final, evaluates its weights, saves a checkpoint and stops. `Gatekeeper`, in the process
that started the runs, raises the number as the slowest run advances, and makes the gate final in time.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from studies.translation.measuring_task import MeasuringTranslationTask
from torch import nn

from repulsive.lab.engine.files import read_json, write_bytes, write_json
from repulsive.lab.engine.launch import Spec, train_here
from repulsive.lab.engine.recipe import Recipe
from repulsive.lab.engine.task import Evaluation, Task

PROGRESS, STOPPED = "progress.json", "stopped.json"  # in the folder of a run
AHEAD = 1  # epochs that a run may be ahead of the slowest one
MARGIN = 1.15  # an epoch is expected to take this many times as long as the last ones
_POLL = 0.05  # seconds between two looks at the gate


@dataclass(frozen=True)
class Gate:
    """A file with the number of epochs that runs may train."""

    path: Path

    def set(self, epochs: int, is_final: bool) -> None:
        """Let runs train so many epochs; if it is final, they stop there."""
        write_json(self.path, {"epochs": epochs, "final": is_final})

    def wait(self, done: int) -> bool:
        """Wait until a run that has done some epochs may train another one; False if it must stop."""
        while True:
            state = read_json(self.path)
            if done < state["epochs"]:
                return True
            if state["final"]:
                return False
            time.sleep(_POLL)


@dataclass(frozen=True)
class Job:
    """A run to train through a gate.

    Args:
        spec: specification of the run.
        gate: the gate of all runs beside it.
    """

    spec: Spec
    gate: Gate

    @property
    def folder(self) -> Path:
        return self.spec.folder

    @property
    def epochs_done(self) -> int:
        """Number of epochs that the run has done, in this call or before."""
        state = read_json(self.folder / PROGRESS)
        return state["epochs"] if state else 0


class GatedTranslationTask(MeasuringTranslationTask):
    """Task whose training waits at a gate after every epoch, and leaves its answers if it is stopped there.

    A stopped run translates the test set only, because time is short.

    Args:
        recipe: recipe of the run, which evaluates once per epoch.
        job: the run and its gate.
    """

    def __init__(self, recipe: Any, job: Job) -> None:
        self._job, self._epoch = job, 0
        super().__init__(recipe)

    def order(self, epoch: int) -> Any:
        self._epoch = epoch
        return super().order(epoch)

    def validate(self, model: nn.Module) -> Evaluation:
        evaluation = super().validate(model)
        done = self._epoch + 1
        write_json(self._job.folder / PROGRESS, {"epochs": done, "at": time.time()})
        if done < self.recipe.training.epochs and not self._job.gate.wait(done):
            save_answers(self._job.folder, done, {"dev": evaluation, "test": self.evaluate(model, "test")})
            os.kill(os.getpid(), signal.SIGTERM)  # the loop saves a checkpoint and stops
        return evaluation


def save_answers(folder: Path, epochs: int, parts: dict[str, Evaluation]) -> None:
    """Write the answers of a run that stops after some epochs, in the format of a finished run."""
    from safetensors.torch import save

    for part, evaluation in parts.items():
        items = {name: x.detach().cpu().contiguous() for name, x in evaluation.items.items()}
        write_bytes(folder / f"{part}.stopped.safetensors", save(items))
    metrics = {part: evaluation.metrics for part, evaluation in parts.items()}
    write_json(folder / STOPPED, {"epochs": epochs, "parts": metrics})


def train(job: Job, file: TextIO) -> None:
    """Train a run in a worker."""

    def make(recipe: Recipe) -> Task:
        return GatedTranslationTask(recipe, job)

    train_here(job.spec, make, quiet=True)


class Gatekeeper:
    """Open the gate of some runs as they advance, and close it in time.

    Args:
        gate: the gate.
        jobs: the runs, finished ones excluded.
        total: epochs of a whole training.
        end: time (of `time.monotonic`) at which the runs should have stopped.
        until: epoch after which the runs stop, also if there is time left; None for `total`.
    """

    def __init__(self, gate: Gate, jobs: Iterable[Job], total: int, end: float, until: int | None = None) -> None:
        self.gate, self.total, self.end = gate, total, end
        self._last = min(total, until or total)
        self.jobs = list(jobs)
        done = [job.epochs_done for job in self.jobs]
        self.allowed = min(self._last, max(done, default=0) + 1)  # the next gate of the run that is furthest
        self.is_final = False
        self._least, self._since = min(done, default=0), time.monotonic()
        self._seconds: list[float] = []  # of the last epochs, the first one excluded: it includes the start
        self._is_first = True
        gate.set(self.allowed, False)

    @property
    def seconds_per_epoch(self) -> float:
        """Return how long the last epochs took, side by side; 0 before the second one has ended."""
        return max(self._seconds[-3:], default=0.0)

    def remove(self, job: Job) -> None:
        """Do not wait for a run that has ended."""
        self.jobs.remove(job)

    def look(self) -> None:
        """Read the progress of all runs, and change the gate if necessary."""
        if not self.jobs:
            return
        least, now = min(job.epochs_done for job in self.jobs), time.monotonic()
        if least > self._least:
            if not self._is_first:
                self._seconds.append((now - self._since) / (least - self._least))
            self._least, self._since, self._is_first = least, now, False
        wanted = min(self._last, least + 1 + AHEAD)
        if self.is_final or (wanted <= self.allowed and now < self.end):
            return
        fits = now + (wanted - least) * MARGIN * self.seconds_per_epoch <= self.end
        self.allowed, self.is_final = (wanted, wanted == self._last < self.total) if fits else (self.allowed, True)
        self.gate.set(self.allowed, self.is_final)
