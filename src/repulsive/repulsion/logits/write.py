"""Write forces into gradients, whole or sharded."""

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
    """A parameter's rows and what is added to their gradient.

    Args:
        slice: the rows.
        force: [M, rows, ...]; None for nothing.
    """

    slice: HeadSlice
    force: Tensor | None


@dataclass(frozen=True)
class _Change:
    """gradient <- factor x gradient + force, for one parameter; all tensors are shaped as this rank's part of it."""

    slice: HeadSlice
    factor: Tensor | None  # None: the same number everywhere
    force: Tensor | None
    registry: dict[str, Tensor] | None  # where its module keeps it, if it is a plain tensor there: quick to look up

    def gradient(self) -> Tensor | None:
        """Today's gradient, as much of it as lies on this rank."""
        if self.registry is not None:
            return self.registry[self.slice.attribute].grad
        if self.slice.parameter().grad is None:
            return None
        grad = gradient_of(self.slice)
        return grad.to_local() if is_sharded(grad) else grad


class Writer:
    """gradient <- share x gradient + force, for the rows of many slices, with few calls.

    Args:
        written: what to add.
        share: of the gradient that is kept.
    """

    def __init__(self, written: Sequence[Written], share: float) -> None:
        self.share = share
        owners: dict[tuple[int, str], list[Written]] = defaultdict(list)
        for one in written:
            owners[id(one.slice.module), one.slice.attribute].append(one)
        self._factors: dict[tuple[object, ...], Tensor] = {}  # equal ones are held once
        changes = [self._change(members) for members in owners.values()]
        # By what the gradient is multiplied with, and whether anything is added: each kind is one call.
        self._kinds = [
            [change for change in changes if (change.factor is None) == plain and (change.force is None) == empty]
            for plain in (True, False)
            for empty in (True, False)
        ]

    def write(self, scale: Tensor | None) -> None:
        """Change today's gradients; a parameter without one is passed over.

        Args:
            scale: what gradients are multiplied with right now.
        """
        for kind in self._kinds:
            today = [change.gradient() for change in kind]
            grads = [grad for grad in today if grad is not None]
            if not grads:
                continue
            changes = kind
            if len(grads) < len(kind):
                changes = [change for change, grad in zip(kind, today, strict=True) if grad is not None]
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
        """The share for rows of heads, 1 for others."""
        rows = [(one.slice.axis, tuple(one.slice.rows.flatten().tolist())) for one in members]
        key = (*rows, parameter.shape, parameter.dtype, parameter.device)
        if key not in self._factors:
            factor = torch.ones(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            for one in members:
                one.slice.put(factor, torch.full_like(one.slice.take(factor), self.share))
            self._factors[key] = factor
        return self._factors[key]


def gradient_norms(layers: Sequence[Sequence[HeadSlice]]) -> Tensor:
    """Norm of the gradients of each layer's slices together, [layers]; of sharded ones over all ranks."""
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
