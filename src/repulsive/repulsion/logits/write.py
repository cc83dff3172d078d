"""Write forces into gradients, whole or sharded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from repulsive.heads.layout import HeadSlice
from repulsive.repulsion.sharding import gradient_of, is_sharded, local_part


@dataclass
class Written:
    """A parameter's rows and what is added to their gradient: [M, rows, ...], None for nothing."""

    slice: HeadSlice
    force: Tensor | None
    _local: tuple[Tensor, Tensor] | None = field(default=None, repr=False)  # on this rank: factor, force


def add_force(written: Sequence[Written], share: float, scale: Tensor | None) -> None:
    """gradient <- share x gradient + force, for the rows of each slice.

    Args:
        written: what to add.
        share: of the gradient that is kept.
        scale: what gradients are multiplied with right now.
    """
    grads: list[Tensor] = []
    forces: list[Tensor] = []
    alone: list[Tensor] = []  # gradients without a force
    for one in written:
        parameter = one.slice.parameter()
        if parameter.grad is None:
            continue
        if is_sharded(parameter):
            _add_sharded(one, share, scale)
            continue
        grad = gradient_of(one.slice)
        rows = one.slice.view(grad)
        if rows is None:
            _add_scattered(one, grad, share, scale)
        elif one.force is None:
            alone.append(rows)
        else:
            grads.append(rows)
            if one.force.dtype != grad.dtype:
                one.force = one.force.to(grad.dtype)
            forces.append(one.force.view_as(rows) if one.force.shape != rows.shape else one.force)
    if share != 1 and grads + alone:
        torch._foreach_mul_(grads + alone, share)
    if grads:
        torch._foreach_add_(grads, forces if scale is None else torch._foreach_mul(forces, scale.to(forces[0])))


def gradient_norm(parts: Sequence[HeadSlice]) -> Tensor:
    """Norm of the gradients of all slices together; of sharded ones over all ranks."""
    squares = []
    for part in parts:
        parameter = part.parameter()
        if parameter.grad is None:
            continue
        grad = gradient_of(part).detach()
        whole = grad.full_tensor() if is_sharded(grad) else grad
        squares.append(part.take(whole).float().square().sum())
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


def _add_scattered(one: Written, grad: Tensor, share: float, scale: Tensor | None) -> None:
    heads = one.slice.take(grad) * share
    if one.force is not None:
        force = one.force.flatten(1).to(heads.dtype)
        heads = heads + (force if scale is None else force * scale.to(force))
    one.slice.put(grad, heads)


def _add_sharded(one: Written, share: float, scale: Tensor | None) -> None:
    """Each rank holds the whole force, and adds the part of it whose gradient it holds."""
    parameter, grad = one.slice.parameter(), gradient_of(one.slice)
    assert is_sharded(parameter) and is_sharded(grad)
    if one._local is None:
        factor = torch.ones(parameter.shape, device=grad.device, dtype=grad.dtype)
        whole = torch.zeros_like(factor)
        one.slice.put(factor, torch.full_like(one.slice.take(factor), share))
        if one.force is not None:
            one.slice.put(whole, one.force.flatten(1))
        mesh, placements = parameter.device_mesh, tuple(parameter.placements)
        one._local = local_part(factor, mesh, placements).contiguous(), local_part(whole, mesh, placements).contiguous()
    factor, force = one._local
    local = grad.to_local()
    local.mul_(factor).add_(force if scale is None else force * scale.to(force))
