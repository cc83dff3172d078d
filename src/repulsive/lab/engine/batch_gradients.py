"""Forward and backward pass of one batch, on every rank."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from repulsive.lab.engine.cuda_graphs import CapturedGradients
from repulsive.lab.engine.loss_meter import Meter
from repulsive.lab.engine.processes import Processes
from repulsive.lab.engine.recipe import Training
from repulsive.lab.engine.task import Inputs, Task
from repulsive.particles.rule import Rule


class BatchGradients:
    """Compute the gradients of a batch, and add its loss to the meter.

    Args:
        task: fetches the inputs of a batch and computes the loss.
        model: the model as Accelerate prepared it.
        optimizer: its gradients are cleared before each batch.
        processes: ranks share the items of a batch.
        meter: losses since the last log.
        training: precision of the model, and whether to replay frequent batch shapes as CUDA graphs. The latter needs
            one process with a GPU.
        rule: the rule attached to the optimizer; one that reads tokens does so in Python, so nothing is captured.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: Any,
        processes: Processes,
        meter: Meter,
        training: Training,
        rule: Rule | None,
    ) -> None:
        self._task, self._model, self._optimizer = task, model, optimizer
        self._processes, self._device, self._meter = processes, processes.device, meter
        self._bf16 = training.precision == "bf16"
        self._weight = 1.0  # of this rank's mean loss
        self.captured: CapturedGradients | None = None
        reads_tokens = rule is not None and rule.reads_tokens
        if training.capture and not reads_tokens and self._device.type == "cuda" and processes.is_single:
            self.captured = CapturedGradients(self._compute, model.parameters(), self._device)

    def __call__(self, batch: Any) -> None:
        mine = batch
        if not self._processes.is_single:  # the mean losses of ranks are weighted by item count
            mine, count = rank_share(batch, self._processes.index, self._processes.count)
            self._weight = count * self._processes.count / len(batch)
        inputs = self._task.fetch(mine)
        if self.captured is not None:
            self.captured(inputs, mine.length)
            return
        self._optimizer.zero_grad()
        moved = {name: value.to(self._device, non_blocking=True) for name, value in inputs.items()}
        self._compute(moved, mine.length)

    def _compute(self, inputs: Inputs, length: int) -> None:
        loss = self._task.loss(self.forward, inputs, length) * self._weight
        self._processes.accelerator.backward(loss)
        self._meter.add(loss.detach())

    def forward(self, *inputs: Any, **settings: Any) -> Any:
        """Call the model in the training precision; the loss stays in float32."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16):
            return self._model(*inputs, **settings)


def rank_share(batch: Any, index: int, processes: int) -> tuple[Any, int]:
    """Return one rank's items of a batch and their number; a rank without items takes one item but counts 0."""
    mine = batch.indices[index::processes]
    if len(mine):
        own = batch.share(index, processes) if hasattr(batch, "share") else dataclasses.replace(batch, indices=mine)
        return own, len(mine)
    return dataclasses.replace(batch, indices=batch.indices[:1]), 0
