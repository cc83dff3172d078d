"""Checkpoint averaging: the mean of the weights at the last few epochs, as is usual in translation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from repulsive.lab.engine.recipe import Training


class Average:
    """Running sum of the weights at the last few epochs.

    The length of a training is fixed when it starts, so the steps to average are known in advance: one sum is kept
    instead of many checkpoints.

    Args:
        training: `average` sets of weights are averaged, `average_every` steps apart, or one per epoch.
        per_epoch: steps per epoch.
        total: steps of the whole training.
    """

    def __init__(self, training: Training, per_epoch: int, total: int) -> None:
        self._most = training.average
        self._every = training.average_every or per_epoch
        self._total = total
        self.count = 0
        self._sum: dict[str, Tensor] = {}

    def is_due(self, step: int) -> bool:
        """Whether the weights after this step are averaged: the last step, and those before it at equal distances."""
        left = self._total - step
        return left % self._every == 0 and left // self._every < self._most

    def add(self, weights: Mapping[str, Tensor]) -> None:
        """Add one set of weights to the sum."""
        self.count += 1
        for name, weight in weights.items():
            if name in self._sum and weight.is_floating_point():
                self._sum[name] += weight.detach()
            else:  # integers, such as counters, keep their last value
                self._sum[name] = weight.detach().clone()

    def weights(self) -> dict[str, Tensor]:
        """Compute the mean of the weights added so far."""
        return {name: x / self.count if x.is_floating_point() else x for name, x in self._sum.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"count": self.count, "sum": self._sum}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Restore the state from a checkpoint.

        Raises:
            ValueError: the number of averaged weights does not fit their sum.
        """
        self.count = int(state["count"])
        self._sum = {name: x.to(device) for name, x in state["sum"].items()}
        if (self.count > 0) != bool(self._sum):
            raise ValueError(f"an average of {self.count} sets of weights, but a sum of {len(self._sum)} tensors")
