"""Weights and gradients that one rank works on during an update: in place if possible, otherwise as moved copies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from repulsive.heads.layout import HeadSlice
from repulsive.heads.sharded_tensors import is_sharded
from repulsive.repulsion.optimizers import has_nothing_to_follow
from repulsive.repulsion.sharding.shard_layout import MeshDims, ShardLayout, gradient_of, shard_layout

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh, Placement


class LocalWeight:
    """One parameter and its gradient on this rank. Both can be read inside `load_local`.

    Args:
        part: a slice of the parameter.
        may_be_idle: whether the parameter may lack a gradient, as that of an expert that got no token.

    Attributes:
        theta: shaped as the parameter: all output features, possibly only some columns.
        grad: the gradient, shaped alike; None if the parameter has none.
        layout: None for a plain tensor.
    """

    def __init__(self, part: HeadSlice, may_be_idle: bool = False) -> None:
        self.part = part
        self.may_be_idle = may_be_idle
        self.theta: Tensor | None = None
        self.grad: Tensor | None = None
        self.layout: ShardLayout | None = None
        self._layouts: dict[object, ShardLayout] = {}

    @property
    def summed_dims(self) -> MeshDims:
        """Mesh dimensions over which inner products of this weight's columns are summed."""
        return () if self.layout is None else self.layout.summed_dims

    @property
    def is_idle(self) -> bool:
        """Whether the parameter has no gradient in this step, and may do so."""
        return self.may_be_idle and has_nothing_to_follow(self.part.parameter())

    @property
    def is_copy(self) -> bool:
        """Whether `theta` and `grad` are moved copies, which have to be written back."""
        return self.layout is not None and self.layout.work_placements != self.layout.placements

    def weights(self) -> Tensor:
        """The parameter as loaded."""
        assert self.theta is not None
        return self.theta

    def gradients(self) -> Tensor:
        """The gradient as loaded; zeros for an idle parameter."""
        if self.grad is None:
            assert self.may_be_idle
            return torch.zeros_like(self.weights())
        return self.grad

    def find_layout(self, whole: bool) -> None:
        """Set `layout` from the current placement of the parameter."""
        parameter = self.part.parameter()
        if not is_sharded(parameter):
            self.layout = None
            return
        key = (parameter.device_mesh, tuple(parameter.placements), whole)
        if key not in self._layouts:
            self._layouts[key] = shard_layout(self.part, parameter, whole)
        self.layout = self._layouts[key]

    def stored(self, name: str) -> Tensor:
        """Return the parameter ("theta") or its gradient ("grad") as stored on this rank, detached."""
        tensor = self.part.parameter() if name == "theta" else gradient_of(self.part)
        return tensor.to_local().detach() if is_sharded(tensor) else tensor.detach()

    def elements(self, part: HeadSlice) -> Tensor | int:
        """Return the indices of the local elements of `part`, row-major over [M, R, columns]: [M, local D].

        If all elements are on this rank, return only their number.
        """
        if self.layout is None:
            return part.num_heads * part.dim
        columns = self.layout.columns
        rows = torch.arange(part.rows.numel(), device=columns.device).view(*part.rows.shape, 1)  # [M, R, 1]
        return (rows * (part.dim // part.rows.shape[1]) + columns).flatten(1)


@contextmanager
def load_local(
    weights: Iterable[LocalWeight],
    *,
    whole: bool = False,
    gradients: bool = True,
    write: str | None = "grad",
    kept: Mapping[LocalWeight, float | Tensor] | None = None,
) -> Iterator[None]:
    """Make weights readable on this rank during a block, and write changes back at the end.

    Args:
        weights: one per parameter.
        whole: move all columns to every rank, for rules that need whole particles.
        gradients: False if only weights are needed.
        write: the part that will be changed: "grad", "theta" or None.
        kept: factors on the stored tensors, to which the moved ones are added; None if the moved ones replace them.
    """
    weights = list(weights)
    names = ("theta", "grad") if gradients else ("theta",)
    try:
        with torch.no_grad():
            for weight in weights:
                weight.find_layout(whole)
                weight.theta = weight.stored("theta")
                if gradients and not weight.is_idle:
                    weight.grad = weight.stored("grad")
            _redistribute(weights, names, back=False)
        yield
        if write is not None:
            with torch.no_grad():
                _redistribute(weights, (write,), back=True, kept=kept)
    finally:
        for weight in weights:
            weight.theta = weight.grad = None


def to_stored(weight: LocalWeight, tensor: Tensor) -> Tensor:
    """Move a tensor that is placed as `weight.theta` to the placement in which this rank stores the parameter."""
    parameter = weight.part.parameter()
    if weight.layout is None or not weight.is_copy or not is_sharded(parameter):
        return tensor
    layout = weight.layout
    return _move([tensor], parameter.device_mesh, parameter.shape, layout.work_placements, layout.placements)[0]


def _redistribute(
    weights: Sequence[LocalWeight],
    names: Sequence[str],
    *,
    back: bool,
    kept: Mapping[LocalWeight, float | Tensor] | None = None,
) -> None:
    """Move tensors to their work placements, or back: one call for all tensors of a kind, as calls are expensive."""
    alike: dict[tuple[object, ...], list[tuple[LocalWeight, str]]] = defaultdict(list)
    for weight in weights:
        parameter = weight.part.parameter()
        if is_sharded(parameter) and weight.is_copy:
            for name in names:
                if getattr(weight, name) is None:
                    continue
                key = (weight.layout, parameter.device_mesh, parameter.shape, getattr(weight, name).dtype)
                alike[key].append((weight, name))
    for members in alike.values():
        first = members[0][0]
        layout, parameter = first.layout, first.part.parameter()
        assert layout is not None and is_sharded(parameter)
        stored, work = layout.placements, layout.work_placements
        tensors: list[Tensor] = [getattr(weight, name) for weight, name in members]
        moved = _move(tensors, parameter.device_mesh, parameter.shape, *((work, stored) if back else (stored, work)))
        for (weight, name), tensor in zip(members, moved, strict=True):
            if back:
                _write(weight.stored(name), tensor, None if kept is None else kept[weight])
            else:
                setattr(weight, name, tensor)


def _write(stored: Tensor, moved: Tensor, factor: float | Tensor | None) -> None:
    """Write a moved tensor to where it is stored; with a factor, add it to the stored tensor times that factor."""
    if factor is None:
        stored.copy_(moved)
    elif isinstance(factor, Tensor):
        torch.addcmul(moved, stored, factor, out=stored)
    else:
        torch.add(moved, stored, alpha=factor, out=stored)


def _move(
    tensors: Sequence[Tensor],
    mesh: DeviceMesh,
    shape: torch.Size,
    source: Sequence[Placement],
    target: Sequence[Placement],
) -> Sequence[Tensor]:
    """Move tensors of one shape from the placements `source` to `target`; take and return their local parts."""
    from torch.distributed.tensor import DTensor

    whole = torch.empty((len(tensors), *shape), device="meta")
    stacked = DTensor.from_local(
        torch.stack(tuple(tensors)),
        mesh,
        [_shift_dim(p) for p in source],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return stacked.redistribute(placements=[_shift_dim(p) for p in target]).to_local().unbind(0)


def _shift_dim(placement: Placement) -> Placement:
    """Return the placement of the same tensor after a dimension is added in front."""
    from torch.distributed.tensor import Shard

    dim: int | None = getattr(placement, "dim", None)
    if dim is None:
        return placement
    if type(placement) is Shard:
        return Shard(dim + 1)
    interleaved: Placement = type(placement)(dim + 1, split_factor=placement.split_factor)  # type: ignore[call-arg,attr-defined]
    return interleaved
