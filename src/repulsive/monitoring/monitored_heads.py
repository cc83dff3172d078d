"""Find the heads that a monitor measures, with inputs on any device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.diagnostics.hooks.traced_projections import traced_projections
from repulsive.errors import NoHeadsFound
from repulsive.heads import HeadGroup, find_heads


def find_monitored_heads(model: nn.Module, example: object, probe: object) -> tuple[list[HeadGroup], dict[str, str]]:
    """Find the heads of a model and those of their output projections that names do not show."""
    parameter = next(model.parameters(), None)
    if parameter is not None:
        example, probe = (move_tensors(inputs, parameter.device) for inputs in (example, probe))
    try:
        groups = find_heads(model, example)
    except NoHeadsFound:
        if example is not None or probe is None:
            raise
        groups = find_heads(model, probe)
    inputs = probe if example is None else example
    return groups, {} if inputs is None else traced_projections(model, groups, inputs)


def move_tensors(batch: Any, device: torch.device) -> Any:
    """Move all tensors of a batch to a device."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: move_tensors(value, device) for name, value in batch.items()}
    return type(batch)(move_tensors(value, device) for value in batch) if isinstance(batch, list | tuple) else batch
