"""What the loop must know of a task, and no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Inputs = dict[str, Tensor]
Forward = Callable[..., Any]  # what a model computes when it is called


class Batch(Protocol):
    """Some items that go together."""

    indices: Tensor  # int64 [B], of the training items
    length: int  # what shapes depend on beside the number of items

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Evaluation:
    """What a model does on a part of the data.

    Args:
        metrics: name -> number.
        items: name -> tensor [N, ...] in the order of the data, for paired comparisons: `correct` and `nll` at least.
        notes: what to know about a metric, such as the signature of a score; they stand in the result.
    """

    metrics: dict[str, float]
    items: dict[str, Tensor] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


class Task(Protocol):
    """One task on one data set. Order and inputs are functions of the recipe's seed and the epoch, nothing else.

    A task whose evaluation takes long may also have `look(model) -> Evaluation`: what is needed of the development set
    while training, `select_by` above all. The end is always evaluated in full, on the development set and the test set,
    or on all that the task lists as `scored`, these two among them.

    One whose parameters do not all learn at the same rate has `rate_factors(model) -> Mapping[str, float]`: what the
    recipe's learning rate is multiplied by, by the parameter's name; 1 for those that are not named.

    One that has heads which are none of the method's business has `repelled(model) -> nn.Module`: the part whose heads
    are.
    """

    num_data: int  # training items
    select_by: str  # the metric of the development set that picks the best weights; higher is better
    shown: Sequence[str]  # metrics worth a column in a live table
    checksums: Mapping[str, str]  # file -> SHA-256

    def model(self) -> nn.Module:
        """A freshly initialised model; draws from torch's global generator."""
        ...

    def to(self, device: torch.device) -> None:
        """Move whatever of the data lives on the device."""
        ...

    def order(self, epoch: int) -> list[Any]:
        """The batches of an epoch."""
        ...

    def fetch(self, batch: Any) -> Inputs:
        """A batch's tensors, on the CPU."""
        ...

    def loss(self, model: Forward, inputs: Inputs, length: int) -> Tensor:
        """Mean loss over the items of a batch, on the device; no waiting for it, so that it can be captured."""
        ...

    def evaluate(self, model: nn.Module, part: str) -> Evaluation:
        """Metrics of a model in evaluation mode on "dev", "test" or another part."""
        ...
