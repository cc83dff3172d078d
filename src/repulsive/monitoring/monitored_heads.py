"""Find the heads that a monitor measures, with inputs on any device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.diagnostics.hooks.measured_layers import find_measured_heads, warn_about_guesses
from repulsive.diagnostics.hooks.traced_projections import traced_projections
from repulsive.errors import UnsupportedWeights
from repulsive.heads import HeadGroup, find_heads
from repulsive.heads.sharded_tensors import is_sharded


def find_monitored_heads(model: nn.Module, example: object, probe: object) -> tuple[list[HeadGroup], dict[str, str]]:
    """Find the heads of a model and those of their output projections that names do not show.

    Raises:
        UnsupportedWeights: there is a probe, and weights are sharded.
    """
    if probe is not None and any(map(is_sharded, model.parameters())):
        raise UnsupportedWeights(
            "probe: the weights are sharded, and rank 0, which alone runs the model on a probe, would wait for the "
            "other ranks; leave probe out to measure training passes"
        )
    parameter = next(model.parameters(), None)
    if parameter is not None:
        example, probe = (move_tensors(inputs, parameter.device) for inputs in (example, probe))
    inputs = probe if example is None else example
    groups = find_measured_heads(model, inputs) if example is None else find_heads(model, example)
    warn_about_guesses(groups)
    return groups, {} if inputs is None else traced_projections(model, groups, inputs)


def move_tensors(batch: Any, device: torch.device) -> Any:
    """Move all tensors of a batch to a device."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: move_tensors(value, device) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [move_tensors(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)  # a named tuple takes arguments
    return batch
