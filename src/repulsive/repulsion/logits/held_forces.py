"""Forces that are added to gradients until they are recomputed, and their measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from repulsive.repulsion.cuda_graphs import is_capturing
from repulsive.repulsion.logits.force import ForceNumbers, rows_of
from repulsive.repulsion.logits.writer import Written
from repulsive.repulsion.measured import Measured


@dataclass
class HeldForce:
    """The force on one layer, added to gradients until it is recomputed.

    Args:
        sides: for each side of the layer (q and k, or v and o), its parameters and the force on each.
        numbers: the scalars of the force, with those of other layers.
        row: row of this layer in `numbers`.
    """

    sides: list[list[Written]]
    numbers: ForceNumbers
    row: int


def measure_forces(
    step: int, layer_of: Mapping[str, int], held: Mapping[int, HeldForce], drives: Tensor, *, has_ended: bool
) -> list[Measured]:
    """Measure groups whose layers have a force.

    Args:
        step: optimizer step.
        layer_of: the layer of each group, by group name.
        held: the forces, by layer.
        drives: |drive| of every layer, [layers].
        has_ended: whether a schedule has ended repulsion; then also measure the drive of layers without a force.
    """
    starts: dict[ForceNumbers, int] = {}  # first row of the numbers of several layers
    rows: dict[str, int] = {}
    ended: dict[str, int] = {}
    count = 0
    for name, layer in layer_of.items():
        if (own := held.get(layer)) is not None:
            if own.numbers not in starts:
                starts[own.numbers] = count
                count += len(own.numbers.layers)
            rows[name] = starts[own.numbers] + own.row
        elif has_ended:
            ended[name] = layer
    measured = [_measured(step, rows, drives, list(starts))] if rows else []
    return [*measured, _without_force(step, ended, drives)] if ended else measured


def _measured(step: int, rows: Mapping[str, int], drives: Tensor, numbers: Sequence[ForceNumbers]) -> Measured:
    """Build the measurement of layers with a force. What is not in `first` waits until a report needs it."""
    norms = numbers[0].norm if len(numbers) == 1 else torch.cat([one.norm for one in numbers])
    drives = rows_of(drives, [layer for one in numbers for layer in one.layers])
    first = torch.stack([drives, norms], dim=1)  # drive and repulsion, [L, 2]
    if is_capturing():
        rest = torch.cat([one.other_numbers() for one in numbers])
        return Measured(step, rows, first, lambda: rest)
    return Measured(step, rows, first, lambda: torch.cat([one.other_numbers() for one in numbers]))


def _without_force(step: int, rows: Mapping[str, int], drives: Tensor) -> Measured:
    """Build the measurement of layers without a force: no tokens are sampled, so similarities are NaN."""
    first = torch.stack([drives, torch.zeros_like(drives)], dim=1)
    nan = float("nan")
    rest = torch.tensor([[nan, nan, 0.0, nan, nan]], device="cpu").expand(len(drives), -1)
    return Measured(step, rows, first, lambda: rest)
