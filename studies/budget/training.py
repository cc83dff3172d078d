"""Train one run in a worker process; it leaves one record."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from studies.tuning.choices import CONTROL, FINAL
from studies.tuning.records import KEY, RECORD, without_data
from studies.unsaved_loop import SilentFolder, UnsavedLoop

from repulsive.errors import DivergedError
from repulsive.lab.engine.progress import Watcher
from repulsive.lab.engine.task import Evaluation
from repulsive.lab.systems.registry import make_task, open_recipe

TESTED = (FINAL, CONTROL)  # the only stages that read the test set
_KEPT = ("nll", "accuracy", "bleu", "sacrebleu", "chrf", "ROUGE-L", "entity coverage", "repeated clauses")


@dataclass(frozen=True)
class Job:
    """One run.

    Args:
        folder: folder of its log and record.
        dataset: name of the dataset.
        stage: name of the stage.
        arm: name of the method, or of the control.
        trial: number of the point.
        seed: random seed.
        recipe: name of the recipe.
        label: name in tables.
        changes: all `key=value` changes of the recipe.
        epochs: passes over the data.
        device: "cpu", "cuda" or None.
        control_of: for a control, the arm that is compared with it.
        force: altered force of the rule, see `studies.altered_forces`; empty: the rule's own.
    """

    folder: Path
    dataset: str
    stage: str
    arm: str
    trial: int
    seed: int
    recipe: str
    label: str
    changes: tuple[str, ...]
    epochs: int
    device: str | None = None
    control_of: str = ""
    force: str = ""

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        """Identify the run among all runs of the study."""
        return self.dataset, self.stage, self.arm, self.trial, self.seed


class TrialLoop(UnsavedLoop):
    """Training loop that generates no texts for the development set, and reads the test set only if it may.

    `reads_test` says whether it may; `epoch_ends` are the times at which epochs ended.
    """

    reads_test = False
    epoch_ends: list[float]

    def _train(self) -> None:
        self.epoch_ends = []
        super()._train()

    def _validate(self) -> None:
        super()._validate()
        self.epoch_ends.append(time.monotonic())

    def _evaluate(self, part: str) -> Evaluation:
        if part == "dev":
            self.bare.eval()
            with torch.inference_mode():
                return self.task.validate(self.bare)
        return super()._evaluate(part) if part == "test" and self.reads_test else Evaluation({})


def train(job: Job, file: TextIO) -> None:
    """Train one run and write its record to its folder.

    Args:
        job: the run.
        file: log of the worker.
    """
    started = time.monotonic()
    recipe = open_recipe(job.recipe, [*job.changes, f"training.epochs={job.epochs}", f"seed={job.seed}"])
    loop = TrialLoop(make_task(recipe), recipe, SilentFolder(job.folder), Watcher(), job.device)
    loop.force, loop.reads_test = job.force, job.stage in TESTED
    record: dict[str, Any] = dict(zip(KEY, job.key, strict=True))
    record |= {"label": job.label, "recipe": job.recipe, "epochs": job.epochs, "changes": without_data(job.changes)}
    record |= {name: value for name in ("control_of", "force") if (value := getattr(job, name))}
    try:
        result = loop.run()
    except DivergedError as error:
        record["failed"] = " ".join(str(error).split())
    else:
        record |= {"steps": result["steps"], "best_epoch": round(result["best_step"] / result["steps"] * job.epochs, 2)}
        record["dev"] = _kept(result["dev"])
        if loop.reads_test:
            record["test"] = _kept(result["test"])
        record["epoch_seconds"] = round(_epoch_seconds(started, loop.epoch_ends), 3)
    device = torch.cuda.get_device_name(loop.device) if loop.device.type == "cuda" else loop.device.type
    record |= {"seconds": round(time.monotonic() - started, 3), "device": device}
    (job.folder / RECORD).write_text(json.dumps(record))


def _kept(values: dict[str, float]) -> dict[str, float]:
    return {name: round(values[name], 6) for name in _KEPT if name in values}


def _epoch_seconds(started: float, ends: list[float]) -> float:
    """Return the mean duration of all epochs but the first, which includes the start; of the first if it is alone."""
    return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else ends[0] - started
