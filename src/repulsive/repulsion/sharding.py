"""Weights that lie on several ranks: what this rank computes of every head, and how it gets there.

A rule needs two things of a group: its Gram matrix, which is a sum over the numbers of a head, and the same linear
combination for every number. So any split *within* heads is a good one: each rank combines what it has, and M x M
products are summed over ranks. A weight sharded along its input dimension is split so already. One sharded along its
output features (`axis`), where whole heads lie on different ranks, is first moved to such a split, and its gradient
back afterwards: an all-to-all of the rank's own share, not a gather of everything. `docs/scaling.md` has the costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard, cast

import torch
from torch import Tensor

from repulsive.errors import UnsupportedWeights
from repulsive.heads.layout import HeadSlice

if TYPE_CHECKING:  # sharding is imported only by those who have shards
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DeviceMesh, DTensor, Placement

_ADVICE = "use fully_shard(..., shard_placement_fn=head_placement(model)), which leaves a piece of every head on each rank"


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is spread over ranks (FSDP2, tensor parallel)."""
    return hasattr(tensor, "placements")


def check(part: HeadSlice) -> None:
    """Raise `UnsupportedWeights` where the weight of a slice is spread in a way that cannot be worked on."""
    parameter = part.parameter()
    if is_sharded(parameter):
        _work(part, parameter, whole=False)


def moves(part: HeadSlice) -> bool:
    """Whether heads lie on different ranks, so that the weight has to be moved before a rule can be applied."""
    parameter = part.parameter()
    return is_sharded(parameter) and any(_dim(p) == part.axis for p in parameter.placements)


def local_size(part: HeadSlice) -> int:
    """Numbers of the parameter on this rank."""
    parameter = part.parameter()
    return parameter.to_local().numel() if is_sharded(parameter) else parameter.numel()


@dataclass(frozen=True)
class Layout:
    """How a sharded parameter lies, and how it is worked on.

    Args:
        placements: where it lies, one placement per dimension of its mesh.
        work: where it is worked on: never sharded along the output features.
        sums: process groups over which products are summed.
        columns: number of each local column among all columns, int64 [columns here]; a column is one input feature.
    """

    placements: tuple[Placement, ...]
    work: tuple[Placement, ...]
    sums: tuple[ProcessGroup, ...]
    columns: Tensor


class Share:
    """One parameter and its gradient as this rank works on them, between `open` and `close` of one update."""

    def __init__(self, part: HeadSlice) -> None:
        self.part = part
        self.theta: Tensor | None = None  # shaped as the parameter, all output features, perhaps some columns only
        self.grad: Tensor | None = None
        self._layout: Layout | None = None
        self._known: tuple[object, Layout] | None = None  # the layout of the placements last seen

    @property
    def sums(self) -> tuple[ProcessGroup, ...]:
        """Process groups over which products of this share are to be summed."""
        return () if self._layout is None else self._layout.sums

    def open(self, *, gradients: bool = True, whole: bool = False) -> None:
        """Look up weight and gradient as they are now; bring them here where heads lie on other ranks.

        Args:
            gradients: False where the weight alone is needed.
            whole: bring every column as well, for rules that need whole particles.
        """
        parameter = self.part.parameter()
        self._layout = None
        if not is_sharded(parameter):
            self.theta = parameter.detach()
            self.grad = gradient_of(self.part) if gradients else None
            return
        with torch.no_grad():
            self._layout = layout = self._find(parameter, whole)
            self.theta = _local(parameter, layout.work)
            if gradients:
                grad = gradient_of(self.part)
                assert is_sharded(grad)
                self.grad = _local(grad, layout.work)

    def write(self, *, weights: bool = False) -> None:
        """Bring a changed gradient (or weight) back to where it lies. Reads and writes nothing in place already."""
        layout, source = self._layout, self.theta if weights else self.grad
        if layout is None or layout.work == layout.placements or source is None:
            return
        from torch.distributed.tensor import DTensor

        target = self.part.parameter() if weights else gradient_of(self.part)
        assert is_sharded(target)
        with torch.no_grad():
            moved = DTensor.from_local(
                source, target.device_mesh, layout.work, run_check=False, shape=target.shape, stride=target.stride()
            )
            _local(target, layout.placements).copy_(_local(moved, layout.placements))

    def close(self) -> None:
        """Let go of what was brought here."""
        self.theta = self.grad = None

    def elements(self, part: HeadSlice) -> Tensor | int:
        """Which numbers of the heads of `part` are here, counted row-major over [M, R, columns]: [M, D here]."""
        parameter = part.parameter()
        if self._layout is None:
            return part.num_heads * part.dim
        columns = self._layout.columns
        rows = torch.arange(part.rows.numel(), device=columns.device).view(*part.rows.shape, 1)  # [M, R, 1]
        return (rows * (parameter.numel() // parameter.shape[part.axis]) + columns).flatten(1)

    def _find(self, parameter: DTensor, whole: bool) -> Layout:
        key = (parameter.device_mesh, tuple(parameter.placements), whole)
        if self._known is None or self._known[0] != key:
            self._known = (key, _layout(self.part, parameter, whole))
        return self._known[1]


@contextmanager
def opened(
    shares: Iterable[Share], *, whole: bool = False, gradients: bool = True, write: str | None = "gradients"
) -> Iterator[None]:
    """Open shares, write back what was changed ("gradients", "weights" or None), and let go of them."""
    shares = list(shares)
    try:
        for share in shares:
            share.open(gradients=gradients, whole=whole)
        yield
        if write is not None:
            for share in shares:
                share.write(weights=write == "weights")
    finally:
        for share in shares:
            share.close()


def gradient_of(part: HeadSlice) -> Tensor:
    """The gradient of a slice's parameter, dense and placed as the parameter, or an error that says which is not."""
    parameter = part.parameter()
    grad = parameter.grad
    name = part.parameter_name
    if grad is None:
        raise UnsupportedWeights(f"{name}: has no gradient")
    if grad.layout != torch.strided:
        raise UnsupportedWeights(f"{name}: its gradient is {grad.layout}; repulsion needs a dense one")
    if is_sharded(parameter) != is_sharded(grad) or (
        is_sharded(parameter) and is_sharded(grad) and parameter.device_mesh != grad.device_mesh
    ):
        raise UnsupportedWeights(
            f"{name}: the weight is spread as {_where(parameter)} and its gradient as {_where(grad)}; "
            "both must lie on one mesh"
        )
    if is_sharded(parameter) and is_sharded(grad) and parameter.placements != grad.placements:
        # Partial sums, or a gradient autograd left elsewhere: optimisers would move it implicitly, at every use.
        parameter.grad = grad = grad.redistribute(placements=parameter.placements)
    return grad


def _layout(part: HeadSlice, parameter: DTensor, whole: bool) -> Layout:
    mesh, placements = parameter.device_mesh, tuple(parameter.placements)
    work = _work(part, parameter, whole)
    sums = tuple(mesh.get_group(i) for i, placement in enumerate(work) if _dim(placement) is not None)
    local = parameter.to_local()
    _check_rows(part, parameter, local)
    shape = list(parameter.shape)
    shape[part.axis] = 1
    numbers = torch.arange(math.prod(shape), device=local.device).view(shape)
    columns = _place(numbers, mesh, work).flatten()
    expected = _local(parameter, work).numel() // parameter.shape[part.axis]
    if columns.numel() != expected:
        raise UnsupportedWeights(_refusal(part, parameter, "torch cannot say which columns lie here"))
    return Layout(placements, work, sums, columns)


def _work(part: HeadSlice, parameter: DTensor, whole: bool) -> tuple[Placement, ...]:
    """Placements to work on: splits of the output features become splits of the largest other dimension."""
    from torch.distributed.tensor import Replicate, Shard

    others = [dim for dim in range(parameter.ndim) if dim != part.axis]
    found: list[Placement] = []
    for placement in parameter.placements:
        if not placement.is_replicate() and _dim(placement) is None:
            raise UnsupportedWeights(_refusal(part, parameter, f"{placement} is neither a shard nor a copy"))
        if whole or placement.is_replicate() or not others:
            found.append(Replicate())
        elif _dim(placement) == part.axis:
            found.append(Shard(max(others, key=lambda dim: parameter.shape[dim])))
        else:
            found.append(placement)
    return tuple(found)


def _check_rows(part: HeadSlice, parameter: DTensor, local: Tensor) -> None:
    """Interleaved shards (FSDP over tensor parallel, in one dimension) are only as good as torch's own account."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    along = [p if _dim(p) == part.axis else Replicate() for p in parameter.placements]
    if all(type(p).__name__ in ("Shard", "Replicate") for p in along):
        return
    shape = [1] * parameter.ndim
    shape[part.axis] = parameter.shape[part.axis]
    numbers = torch.arange(parameter.shape[part.axis], device=local.device).view(shape)
    here = _place(numbers, mesh, along)
    again = DTensor.from_local(here, mesh, along, run_check=False, shape=numbers.shape, stride=numbers.stride())
    if here.numel() != local.shape[part.axis] or not torch.equal(again.full_tensor(), numbers):
        raise UnsupportedWeights(_refusal(part, parameter, "this version of torch does not move such shards rightly"))


def _place(numbers: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """What of `numbers`, which every rank has, a rank would hold: a slice, nothing is sent."""
    from torch.distributed.tensor import DTensor, Replicate

    return _local(DTensor.from_local(numbers, mesh, [Replicate()] * mesh.ndim, run_check=False), placements)


def _local(tensor: DTensor, placements: Sequence[Placement]) -> Tensor:
    """This rank's part of a tensor under `placements`: the very memory where it lies so already, else a copy."""
    detached = cast("DTensor", tensor.detach())
    here = tuple(detached.placements) == tuple(placements)
    return (detached if here else detached.redistribute(placements=placements)).to_local()


def _dim(placement: Placement) -> int | None:
    """The dimension a placement shards, interleaved ones included; None for copies and partial sums."""
    dim: int | None = getattr(placement, "dim", None)
    return dim


def _where(tensor: Tensor) -> str:
    return f"{tuple(tensor.placements)} on {tensor.device_mesh}" if is_sharded(tensor) else "a plain tensor"


def _refusal(part: HeadSlice, parameter: DTensor, why: str) -> str:
    return f"{part.parameter_name}: sharded as {tuple(parameter.placements)}: {why}; {_ADVICE}"
