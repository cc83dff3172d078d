"""Stop a training that cannot succeed: values are not finite, the model has collapsed, or repulsion sees no tokens."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from repulsive.errors import DivergedError, RunError, list_first
from repulsive.lab.engine.loss_meter import Meter
from repulsive.lab.engine.processes import Processes
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.scores import COMPARED
from repulsive.lab.engine.task import Task
from repulsive.repulsion.logits.repulsion import NoTokensWarning
from repulsive.repulsion.model_collapse import CollapseDetector


class DivergenceGuard:
    """Check losses, weights and gradient norms; record the reason in the run folder and raise `DivergedError`.

    Args:
        task: the task, for the items of a batch.
        folder: the run folder.
        processes: the ranks; if one stops, all must stop.
        meter: losses since the last log.
        stop_collapsed: stop a collapsed model; False only warns.
    """

    def __init__(
        self, task: Task, folder: RunFolder, processes: Processes, meter: Meter, *, stop_collapsed: bool
    ) -> None:
        self._task, self._folder, self._processes, self._meter = task, folder, processes, meter
        self._stop_collapsed = stop_collapsed
        self._collapse = CollapseDetector()

    def check_losses(self, step: int) -> None:
        """Raise `DivergedError` if a loss since the last log was not finite, with the first such step.

        Args:
            step: steps taken so far.
        """
        bad = self._meter.first_bad()
        if bad is not None:
            self._diverged(step - self._meter.count() + bad + 1, "the loss is not a finite number")

    def check_weights(self, step: int, model: nn.Module) -> None:
        """Raise `DivergedError` if a weight is not finite: a finite loss can have infinite gradients."""
        floats = [x for x in model.state_dict().values() if x.is_floating_point()]
        if not bool(torch.stack([x.isfinite().all() for x in floats]).all()):
            self._diverged(step, "its update made weights that are not finite numbers")

    def check_scores(self, step: int, part: str, metrics: Mapping[str, float]) -> None:
        """Raise `DivergedError` if a loss of a data split is infinite: finite losses of batches can add up to that.

        Args:
            step: steps taken so far.
            part: name of the data split.
            metrics: name -> number.
        """
        if infinite := [name for name in COMPARED if math.isinf(metrics.get(name, 0.0))]:
            self._stop(f"step {step}: the {infinite[0]} of the {part} set is infinite. {self._remedy}")

    @property
    def _remedy(self) -> str:
        return (
            "Lower optimizer.lr, set optimizer.clip, or lower method.alpha or method.stepsize, and train with another "
            f"--out ({self._folder.path} keeps its last good checkpoint)"
        )

    def watch_for_collapse(self, step: int, loss: float, drive: float) -> None:
        """Warn of a collapsed model, or stop its training; see `CollapseDetector.observe` for the arguments."""
        message = self._collapse.observe(step, loss, drive)
        if not self._stop_collapsed:
            if message and self._processes.main:
                warnings.warn(message, stacklevel=3)
        elif message := next(filter(None, self._processes.gather(message)), None):  # all ranks stop, or some would hang
            self._stop(message)

    def read_log(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Continue to watch for a collapse after the logged steps of a resumed training."""
        self._collapse.read_log(lines)

    def _diverged(self, step: int, problem: str) -> NoReturn:
        per_epoch = len(self._task.order(0))
        batch = self._task.order((step - 1) // per_epoch)[(step - 1) % per_epoch]
        items = list_first(batch.indices.tolist(), 8)
        self._stop(
            f"step {step}: {problem}; items {items} of the training set were in the batch. "
            f"Nothing of that step is saved. {self._remedy}"
        )

    def _stop(self, reason: str) -> NoReturn:
        if self._processes.main:
            self._folder.record_divergence(reason)
        raise DivergedError(reason)


@contextmanager
def tokens_required(folder: RunFolder) -> Iterator[None]:
    """Raise an error if repulsion between logits gets no tokens: the run would be plain training under another name.

    Raises:
        RunError: no tokens were sampled.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoTokensWarning)
        try:
            yield
        except NoTokensWarning as warning:
            raise RunError(f"{folder.path}: {warning}") from None
