"""The mean of the weights at the last few looks: what papers on translation call checkpoint averaging."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from repulsive.lab.engine.recipe import Training


class Average:
    """A sum of weights that grows at the steps that count.

    How long a training takes is known when it begins, so which steps are its last is too: one sum is kept instead of
    many checkpoints.

    Args:
        training: `average` weights are averaged, `average_every` steps apart, or an epoch each.
        per_epoch: steps of an epoch.
        total: steps of the whole training.
    """

    def __init__(self, training: Training, per_epoch: int, total: int) -> None:
        self._most = training.average
        self._every = training.average_every or per_epoch
        self._total = total
        self.count = 0
        self._sum: dict[str, Tensor] = {}

    def due(self, step: int) -> bool:
        """Whether this is a step that counts: the last one, and those before it at equal distances."""
        left = self._total - step
        return left % self._every == 0 and left // self._every < self._most

    def add(self, weights: Mapping[str, Tensor]) -> None:
        """Take weights in."""
        self.count += 1
        for name, weight in weights.items():
            if name in self._sum and weight.is_floating_point():
                self._sum[name] += weight.detach()
            else:  # of counters and the like the last value is kept
                self._sum[name] = weight.detach().clone()

    def weights(self) -> dict[str, Tensor]:
        """The mean of what was taken in."""
        return {name: x / self.count if x.is_floating_point() else x for name, x in self._sum.items()}

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"count": self.count, "sum": self._sum}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """As it was when the checkpoint was written."""
        self.count = int(state["count"])
        self._sum = {name: x.to(device) for name, x in state["sum"].items()}
        if (self.count > 0) != bool(self._sum):
            raise ValueError(f"a mean of {self.count} weights that are not there")
