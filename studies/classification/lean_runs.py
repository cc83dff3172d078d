"""Train the runs of `paper_sizes` and `follow_up` in worker processes: each leaves one record, and its answers.

A classifier of the paper's size has 60 million weights, and a run lasts less than a minute, so checkpoints would take
longer than training. An interrupted run is trained again.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from studies.tuning.choices import CONTROL, FINAL
from studies.tuning.records import KEY, RECORD, without_data
from studies.unsaved_loop import SilentFolder, UnsavedLoop
from torch import Tensor, nn

from repulsive.diagnostics.uncertainty import detect_foreign
from repulsive.errors import DivergedError
from repulsive.lab.engine import assets
from repulsive.lab.engine.loop import Loop
from repulsive.lab.engine.progress import Watcher
from repulsive.lab.engine.task import Evaluation
from repulsive.lab.layers import lstm
from repulsive.lab.systems.classification.foreign import unknown_share
from repulsive.lab.systems.classification.inputs import model_inputs
from repulsive.lab.systems.classification.measure import predictions
from repulsive.lab.systems.classification.readings import read_examples, spread
from repulsive.lab.systems.classification.task import ClassificationTask
from repulsive.lab.systems.registry import open_recipe
from repulsive.lab.text.batches import Buckets
from repulsive.metrics import classification as metrics

ANSWERS, MAPS = "answers.npz", "maps.json"
HEADS, ENTROPY, WIDE_FINAL, STRENGTH_FINAL = "heads", "entropy", "wide final", "strength final"
TESTED = (FINAL, CONTROL, HEADS, ENTROPY, WIDE_FINAL, STRENGTH_FINAL)  # the only stages that read the test set
LONGEST = 60  # words of a review whose attention is stored
NATS = 1 / 64  # resolution of the stored NLL of an item
ENTROPY_NATS = 1e-4  # resolution of the stored entropy of an item
_BATCH = 256
_KEPT = ("accuracy", "nll", "ece15", "oe15", "brier", "dist", "relative_dist", "overlap", "overlap_cosine")


@dataclass(frozen=True)
class Job:
    """One run.

    Args:
        folder: folder of its log and record.
        dataset: name of the dataset.
        arm: name of the method, or of the control.
        stage: name of the stage.
        trial: number of the point.
        seed: random seed.
        changes: all `key=value` changes of the recipe.
        train: number of training items.
        device: "cpu", "cuda" or None.
        rows: sentences per Triton program of the LSTM.
        recipe: name of the method's recipe; empty: `arm`.
        control_of: for a control, the arms that are compared with it.
        force: altered force of the rule, see `altered_forces`; empty: the rule's own.
        foreign: prepared folder of another dataset, on whose test set entropies are measured.
        shown: number of test items whose attention is stored.
    """

    folder: Path
    dataset: str
    arm: str
    stage: str
    trial: int
    seed: int
    changes: tuple[str, ...]
    train: int
    device: str | None = None
    rows: int = lstm.ROWS
    recipe: str = ""
    control_of: tuple[str, ...] = ()
    force: str = ""
    foreign: Path | None = None
    shown: int = 0

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        """Identify the run among all runs of the study."""
        return self.dataset, self.stage, self.arm, self.trial, self.seed

    @property
    def reads_test(self) -> bool:
        return self.stage in TESTED

    @property
    def answers_name(self) -> str:
        """Name of the run among the stored answers; empty if they are not stored."""
        own = f"{self.arm}/{self.seed}"
        return {FINAL: own, CONTROL: own, ENTROPY: f"{ENTROPY}/{own}"}.get(self.stage, "")


class TrialTask(ClassificationTask):
    """Classification that selects the best epoch by NLL, and reads the test set only if asked to.

    Args:
        recipe: recipe of the run.
        is_final: evaluate on the test set.
    """

    select_by = "likelihood"

    def __init__(self, recipe: Any, is_final: bool) -> None:
        super().__init__(recipe)
        self._is_final = is_final

    def assets(self) -> dict[str, bytes]:
        return {}

    def evaluate(self, model: nn.Module, part: str) -> Evaluation:
        if part == "dev":
            return self.validate(model)
        return super().evaluate(model, part) if self._is_final else Evaluation({})

    def validate(self, model: nn.Module) -> Evaluation:
        """Evaluate on the development set, without measuring the heads."""
        part = self.parts["dev"]
        logits = torch.empty(len(part), len(self.data.classes), device=self._device)
        for batch in Buckets(part.lengths.cpu(), _BATCH).in_order():
            indices = batch.indices.to(self._device)
            logits[indices] = model(*model_inputs(part, indices, batch.length)).float()
        logits, labels = logits.cpu(), part.labels.cpu()
        scores = metrics.scores(logits, labels)
        return Evaluation(scores | {"likelihood": -scores["nll"]}, {"logits": logits, "labels": labels})


def train(job: Job, file: TextIO) -> None:
    """Train one run and write its record, and its answers on the test set if it reads it, to its folder.

    Args:
        job: the run.
        file: log of the worker.
    """
    started = time.monotonic()
    lstm.ROWS = job.rows
    recipe = open_recipe(f"{job.dataset}/{job.recipe or job.arm}", [*job.changes, f"seed={job.seed}"])
    task = TrialTask(recipe, job.reads_test)
    loop = UnsavedLoop(task, recipe, SilentFolder(job.folder), Watcher(), job.device)
    loop.force = job.force
    record: dict[str, Any] = dict(zip(KEY, job.key, strict=True))
    record |= {"label": recipe.label, "train": task.num_data, "changes": without_data(job.changes)}
    if job.recipe and job.recipe != job.arm:
        record["recipe"] = job.recipe
    if job.force:
        record["force"] = job.force
    if job.control_of:
        record |= {"label": job.arm, "control_of": list(job.control_of)}
    try:
        result = loop.run()
    except DivergedError as error:
        record |= {"failed": " ".join(str(error).split())}
    else:
        best = result["best_step"] / max(1, result["steps"]) * recipe.training.epochs
        record |= {"steps": result["steps"], "best_epoch": round(best, 2), "dev": _kept(result["dev"])}
        if job.reads_test:
            dev, test = (loop.evaluations[part].items for part in ("dev", "test"))
            record["test"] = _kept(result["test"]) | after_scaling(dev, test)
            stored: dict[str, Any] = dict(answers(test))
            if job.foreign is not None:
                record["foreign"], entropies = measure_foreign(task, loop.bare, test, job.foreign)
                stored |= entropies
            if job.answers_name:
                np.savez_compressed(job.folder / ANSWERS, **stored)
            if job.shown:
                (job.folder / MAPS).write_text(json.dumps(read_attention(task, loop.bare, job.shown)))
    record |= {"seconds": round(time.monotonic() - started, 2), "device": _device(loop)}
    (job.folder / RECORD).write_text(json.dumps(record))


def _kept(values: dict[str, float]) -> dict[str, float]:
    return {name: round(values[name], 6) for name in _KEPT if name in values}


def _device(loop: Loop) -> str:
    return torch.cuda.get_device_name(loop.device) if loop.device.type == "cuda" else loop.device.type


def answers(items: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Return the predicted class and the NLL of each item in few bits; the NLL is rounded to `NATS`."""
    nll = (items["nll"].clamp(max=1000) / NATS).round() * NATS
    predicted = items["logits"].argmax(-1)
    return {"predicted": predicted.to(torch.uint8).numpy(), "nll": nll.to(torch.float16).numpy()}


def measure_foreign(
    task: TrialTask, model: nn.Module, test: dict[str, Tensor], folder: Path
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Measure the entropy of predictions on the test set and on that of another dataset (the paper's appendix C.5).

    Args:
        task: the task, with its data.
        model: the trained model.
        test: answers on the task's own test set.
        folder: prepared folder of the other dataset; its words are encoded with the task's vocabulary.

    Returns:
        The means, the AUROC of detecting foreign items by their entropy, and the share of foreign words that are not
        in the vocabulary; and the entropy of each item, uint16, in units of `ENTROPY_NATS`.
    """
    model.eval()
    part = task.open_foreign(folder, "test")
    inside, outside = test["logits"].double().softmax(-1), predictions(model, part)  # [N, C], [K, C]
    detection = detect_foreign(inside, outside)
    values = {"auroc": detection.auroc, "own_entropy": detection.inside, "foreign_entropy": detection.outside}
    values["unknown"] = unknown_share(part)
    entropies = {"own_entropy": metrics.entropy(inside), "foreign_entropy": metrics.entropy(outside)}
    arrays = {name: (x / ENTROPY_NATS).round().numpy().astype(np.uint16) for name, x in entropies.items()}
    return {name: round(value, 6) for name, value in values.items()}, arrays


def read_attention(task: TrialTask, model: nn.Module, count: int) -> list[dict[str, Any]]:
    """Read prediction and attention of all heads for some short items of the test set.

    Args:
        task: the task, with its data.
        model: the trained model.
        count: number of items, of all classes in turn.
    """
    part = task.data.parts["test"]
    short = assets.select(part, (part.lengths <= LONGEST).nonzero()[:, 0])
    # The model stays on its device: on the CPU it could not run if Triton kernels are requested.
    device = next(model.parameters()).device
    examples = read_examples(task.data, short.to(device), spread(short, count).to(device), {"": model.eval()})
    return [
        {
            "tokens": list(example.tokens),
            "label": example.label,
            "predicted": reading.predicted,
            "probability": round(reading.probability, 4),
            "attention": [[round(x, 4) for x in row] for row in reading.weights().tolist()],  # [M, T]
        }
        for example in examples
        for reading in example.readings
    ]


def after_scaling(dev: dict[str, Tensor], test: dict[str, Tensor]) -> dict[str, float]:
    """Fit a temperature on the development set, and score the test set with it (Guo et al., 2017)."""
    temperature = fit_temperature(dev["logits"], dev["labels"])
    scaled = metrics.scores(test["logits"].double() / temperature, test["labels"])
    values = {"temperature": temperature} | {f"scaled_{name}": scaled[name] for name in ("nll", "ece15", "oe15")}
    return {name: round(value, 6) for name, value in values.items()}


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    r"""Find the T that minimises the mean NLL of softmax(logits / T), by golden-section search over ln T in [-3, 3].

    The NLL is convex in 1 / T, so it has one minimum.
    """
    logits = logits.double()

    def nll(log_t: float) -> float:
        return float(nn.functional.cross_entropy(logits / math.exp(log_t), labels))

    low, high, golden = -3.0, 3.0, (math.sqrt(5) - 1) / 2
    while high - low > 1e-6:
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if nll(left) <= nll(right) else (left, high)
    return math.exp((low + high) / 2)
