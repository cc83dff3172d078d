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
    """A parameter's rows and what is added to their gradient.

    Args:
        slice: the rows.
        force: [M, rows, ...]; None for nothing.
    """

    slice: HeadSlice
    force: Tensor | None
    _local: tuple[Tensor, Tensor] | None = field(default=None, repr=False)  # on this rank: factor, force


class Writer:
    """gradient <- share x gradient + force, for the rows of many slices, with few calls.

    Args:
        written: what to add.
        share: of the gradient that is kept.
    """

    def __init__(self, written: Sequence[Written], share: float) -> None:
        self.share = share
        self._whole: list[tuple[dict[str, Tensor], str]] = []  # parameters that are all heads, and plain tensors
        self._forces: list[Tensor] = []
        self._others: list[Written] = []
        for one in written:
            parameter = one.slice.parameter()
            registered = one.slice.module._parameters
            plain = one.slice.attribute in registered and not is_sharded(parameter) and one.slice.is_whole
            if plain and one.force is not None:
                self._whole.append((registered, one.slice.attribute))  # type: ignore[arg-type]
                self._forces.append(one.force.reshape(parameter.shape).to(parameter.dtype))
            else:
                self._others.append(one)

    def write(self, scale: Tensor | None) -> None:
        """Change today's gradients; a parameter without one is passed over.

        Args:
            scale: what gradients are multiplied with right now.
        """
        today = [parameters[name].grad for parameters, name in self._whole]
        grads, forces = [grad for grad in today if grad is not None], self._forces
        if len(grads) < len(today):
            forces = [force for grad, force in zip(today, forces, strict=True) if grad is not None]
        if grads:
            if self.share != 1:
                torch._foreach_mul_(grads, self.share)
            if scale is not None:
                forces = list(torch._foreach_mul(forces, scale.to(forces[0])))
            torch._foreach_add_(grads, forces)
        for one in self._others:
            if one.slice.parameter().grad is not None:
                self._write_rows(one, scale)

    def _write_rows(self, one: Written, scale: Tensor | None) -> None:
        parameter, grad = one.slice.parameter(), gradient_of(one.slice)
        if is_sharded(parameter):
            self._write_sharded(one, scale)
            return
        rows = one.slice.view(grad)
        force = one.force
        if force is not None:
            force = force.to(grad.dtype) if scale is None else force.to(grad.dtype) * scale.to(grad.dtype)
        if rows is not None:
            rows.mul_(self.share)
            if force is not None:
                rows.add_(force)
            return
        heads = one.slice.take(grad) * self.share
        one.slice.put(grad, heads if force is None else heads + force.flatten(1))

    def _write_sharded(self, one: Written, scale: Tensor | None) -> None:
        """Each rank holds the whole force, and adds the part of it whose gradient it holds."""
        parameter, grad = one.slice.parameter(), gradient_of(one.slice)
        assert is_sharded(parameter) and is_sharded(grad)
        if one._local is None:
            factor = torch.ones(parameter.shape, device=grad.device, dtype=grad.dtype)
            whole = torch.zeros_like(factor)
            one.slice.put(factor, torch.full_like(one.slice.take(factor), self.share))
            if one.force is not None:
                one.slice.put(whole, one.force.flatten(1))
            mesh, placements = parameter.device_mesh, tuple(parameter.placements)
            one._local = (
                local_part(factor, mesh, placements).contiguous(),
                local_part(whole, mesh, placements).contiguous(),
            )
        factor, force = one._local
        grad.to_local().mul_(factor).add_(force if scale is None else force * scale.to(force))


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
