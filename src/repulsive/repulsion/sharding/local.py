"""Weights and gradients as one rank works on them during one update: in place where they can be, moved where not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from repulsive.heads.layout import HeadSlice
from repulsive.repulsion.sharding.parts import Layout, Sums, gradient_of, is_sharded, layout_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh, Placement


class Share:
    """One parameter and its gradient; readable while `opened`."""

    def __init__(self, part: HeadSlice) -> None:
        self.part = part
        self.theta: Tensor | None = None  # shaped as the parameter; all output features, perhaps some columns only
        self.grad: Tensor | None = None
        self.layout: Layout | None = None  # None for a plain tensor
        self._known: dict[object, Layout] = {}

    @property
    def sums(self) -> Sums:
        """Mesh dimensions over which products of this share are to be summed."""
        return () if self.layout is None else self.layout.sums

    @property
    def moves(self) -> bool:
        """Whether what is worked on is a copy, to be written back."""
        return self.layout is not None and self.layout.work != self.layout.placements

    def look(self, whole: bool) -> None:
        """Find out where the parameter lies now."""
        parameter = self.part.parameter()
        if not is_sharded(parameter):
            self.layout = None
            return
        key = (parameter.device_mesh, tuple(parameter.placements), whole)
        if key not in self._known:
            self._known[key] = layout_of(self.part, parameter, whole)
        self.layout = self._known[key]

    def lying(self, name: str) -> Tensor:
        """The parameter ("theta") or its gradient ("grad") as it lies on this rank, detached."""
        tensor = self.part.parameter() if name == "theta" else gradient_of(self.part)
        tensor = tensor.detach()
        return tensor.to_local() if is_sharded(tensor) else tensor

    def elements(self, part: HeadSlice) -> Tensor | int:
        """Which numbers of the heads of `part` are here, counted row-major over [M, R, columns]: [M, D here]."""
        if self.layout is None:
            return part.num_heads * part.dim
        columns = self.layout.columns
        rows = torch.arange(part.rows.numel(), device=columns.device).view(*part.rows.shape, 1)  # [M, R, 1]
        return (rows * (part.dim // part.rows.shape[1]) + columns).flatten(1)


@contextmanager
def opened(
    shares: Iterable[Share], *, whole: bool = False, gradients: bool = True, write: str | None = "grad"
) -> Iterator[None]:
    """Make shares readable, then bring back what was changed.

    Args:
        shares: one per parameter.
        whole: bring every column as well, for rules that need whole particles.
        gradients: False where weights alone are needed.
        write: what will be changed: "grad", "theta" or None.
    """
    shares = list(shares)
    names = ("theta", "grad") if gradients else ("theta",)
    try:
        with torch.no_grad():
            for share in shares:
                share.look(whole)
                for name in names:
                    setattr(share, name, share.lying(name))
            _carry(shares, names, back=False)
        yield
        if write is not None:
            with torch.no_grad():
                _carry(shares, (write,), back=True)
    finally:
        for share in shares:
            share.theta = share.grad = None


def _carry(shares: Sequence[Share], names: Sequence[str], *, back: bool) -> None:
    """Move tensors to where they are worked on, or back: all that are alike in one call, as calls are what costs."""
    alike: dict[tuple[object, ...], list[tuple[Share, str]]] = defaultdict(list)
    for share in shares:
        parameter = share.part.parameter()
        if is_sharded(parameter) and share.moves:
            for name in names:
                key = (share.layout, parameter.device_mesh, parameter.shape, getattr(share, name).dtype)
                alike[key].append((share, name))
    for members in alike.values():
        first = members[0][0]
        layout, parameter = first.layout, first.part.parameter()
        assert layout is not None and is_sharded(parameter)
        way = (layout.work, layout.placements) if back else (layout.placements, layout.work)
        tensors: list[Tensor] = [getattr(share, name) for share, name in members]
        moved = _move(tensors, parameter.device_mesh, parameter.shape, *way)
        for (share, name), tensor in zip(members, moved, strict=True):
            if back:
                share.lying(name).copy_(tensor)
            else:
                setattr(share, name, tensor)


def _move(
    tensors: Sequence[Tensor],
    mesh: DeviceMesh,
    shape: torch.Size,
    source: Sequence[Placement],
    target: Sequence[Placement],
) -> Sequence[Tensor]:
    """Local parts under `source` of tensors of one shape -> their local parts under `target`."""
    from torch.distributed.tensor import DTensor

    whole = torch.empty((len(tensors), *shape), device="meta")
    stacked = DTensor.from_local(
        torch.stack(tuple(tensors)),
        mesh,
        [_behind(p) for p in source],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return stacked.redistribute(placements=[_behind(p) for p in target]).to_local().unbind(0)


def _behind(placement: Placement) -> Placement:
    """The placement of the same tensor with one more dimension in front."""
    from torch.distributed.tensor import Shard

    dim: int | None = getattr(placement, "dim", None)
    if dim is None:
        return placement
    if type(placement) is Shard:
        return Shard(dim + 1)
    interleaved: Placement = type(placement)(dim + 1, split_factor=placement.split_factor)  # type: ignore[call-arg,attr-defined]
    return interleaved
