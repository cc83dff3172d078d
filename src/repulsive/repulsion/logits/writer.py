"""Add forces to gradients, for whole and for sharded parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from repulsive.heads.layout import HeadSlice
from repulsive.repulsion.sharding.shard_layout import gradient_of, is_sharded, local_part


@dataclass(frozen=True)
class Written:
    """Rows of a parameter and the force on them.

    Args:
        slice: the rows.
        force: [M, rows, ...], added to the gradient; None for no force.
    """

    slice: HeadSlice
    force: Tensor | None


@dataclass(frozen=True)
class _Change:
    """The change gradient <- factor x gradient + force of one parameter; tensors have the shape of this rank's part."""

    slice: HeadSlice
    factor: Tensor | None  # None: the writer's share for all rows
    force: Tensor | None
    registry: dict[str, Tensor] | None  # the module's parameters, for a fast lookup of a plain tensor

    def gradient(self) -> Tensor | None:
        """Return the current gradient, or this rank's part of it; None if there is no gradient."""
        if self.registry is not None:
            return self.registry[self.slice.attribute].grad
        if self.slice.parameter().grad is None:
            return None
        grad = gradient_of(self.slice)
        return grad.to_local() if is_sharded(grad) else grad


class Writer:
    """Apply gradient <- share x gradient + force to the rows of many slices in a few calls.

    Args:
        written: rows and forces.
        share: factor on the gradient of these rows.
    """

    def __init__(self, written: Sequence[Written], share: float) -> None:
        self.share = share
        owners: dict[tuple[int, str], list[Written]] = defaultdict(list)
        for one in written:
            owners[id(one.slice.module), one.slice.attribute].append(one)
        self._factors: dict[tuple[object, ...], Tensor] = {}  # shared between equal parameters
        changes = [self._change(members) for members in owners.values()]
        # Grouped by scalar or tensor factor, and with or without a force: each kind is one call.
        self._kinds = [
            [change for change in changes if (change.factor is None) == plain and (change.force is None) == empty]
            for plain in (True, False)
            for empty in (True, False)
        ]

    def write(self, scale: Tensor | None) -> None:
        """Change the current gradients; parameters without a gradient are skipped.

        Args:
            scale: loss scale that the gradients contain, or None.
        """
        for kind in self._kinds:
            current = [change.gradient() for change in kind]
            grads = [grad for grad in current if grad is not None]
            if not grads:
                continue
            changes = kind
            if len(grads) < len(kind):
                changes = [change for change, grad in zip(kind, current, strict=True) if grad is not None]
            factors = [change.factor for change in changes if change.factor is not None]
            if factors:
                torch._foreach_mul_(grads, factors)
            elif self.share != 1:
                torch._foreach_mul_(grads, self.share)
            forces = [change.force for change in changes if change.force is not None]
            if forces and scale is not None:
                forces = list(torch._foreach_mul(forces, scale.to(forces[0])))
            if forces:
                torch._foreach_add_(grads, forces)

    def _change(self, members: Sequence[Written]) -> _Change:
        first = members[0].slice
        parameter = first.parameter()
        whole = len(members) == 1 and first.is_whole
        force: Tensor | None = None
        if whole and members[0].force is not None:
            force = members[0].force.reshape(parameter.shape).to(parameter.dtype)
        elif any(one.force is not None for one in members):
            force = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            for one in members:
                if one.force is not None:
                    one.slice.put(force, one.force.flatten(1))
        factor = None if whole else self._factor(members, parameter)
        if is_sharded(parameter):
            mesh, placements = parameter.device_mesh, tuple(parameter.placements)
            force, factor = (None if t is None else local_part(t, mesh, placements) for t in (force, factor))
        kept: dict[str, Tensor] = first.module._parameters  # type: ignore[assignment]
        plain = first.attribute in kept and not is_sharded(parameter)
        return _Change(first, factor, force, kept if plain else None)

    def _factor(self, members: Sequence[Written], parameter: Tensor) -> Tensor:
        """Build a tensor with the share in rows that belong to heads and 1 in other rows."""
        rows = [(one.slice.axis, tuple(one.slice.rows.flatten().tolist())) for one in members]
        key = (*rows, parameter.shape, parameter.dtype, parameter.device)
        if key not in self._factors:
            factor = torch.ones(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            for one in members:
                one.slice.put(factor, torch.full_like(one.slice.take(factor), self.share))
            self._factors[key] = factor
        return self._factors[key]


def gradient_norms(layers: Sequence[Sequence[HeadSlice]]) -> Tensor:
    """Compute the joint gradient norm of each layer's slices, [layers]; sharded gradients are gathered."""
    rows, owners = [], []
    for number, parts in enumerate(layers):
        for part in parts:
            if part.parameter().grad is None:
                continue
            grad = gradient_of(part).detach()
            whole = grad.full_tensor() if is_sharded(grad) else grad
            rows.append(whole if part.is_whole else part.take(whole))
            owners.append(number)
    if not rows:
        return torch.zeros(len(layers))
    squares = torch.stack(torch._foreach_norm(rows)).float().square()
    index = torch.tensor(owners).to(squares.device)
    return squares.new_zeros(len(layers)).index_add_(0, index, squares).sqrt()
