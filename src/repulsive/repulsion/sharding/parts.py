"""Weights that lie on several ranks: which part of every head this rank works on.

A rule needs two things of a group: its Gram matrix, which is a sum over the numbers of a head, and the same linear
combination for every number. So any split *within* heads is a good one: each rank combines what it has, and M x M
products are summed over ranks. A weight sharded along its input dimension is split so already. One sharded along its
output features (`axis`), where whole heads lie on different ranks, is first moved to such a split, and its gradient
back afterwards: an all-to-all of the rank's own share, not a gather of everything. `docs/scaling.md` has the costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from repulsive.errors import NoHeadsFound, UnsupportedWeights
from repulsive.heads.layout import HeadSlice

if TYPE_CHECKING:  # sharding is imported only by those who have shards
    from torch.distributed.tensor import DeviceMesh, DTensor, Placement

Sums = tuple[tuple["DeviceMesh", int], ...]

_ADVICE = "use fully_shard(..., shard_placement_fn=head_placement(model)): every rank then has a piece of every head"


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is spread over ranks (FSDP2, tensor parallel)."""
    return hasattr(tensor, "placements")


def check(part: HeadSlice) -> None:
    """Raise `UnsupportedWeights` where the weight of a slice is spread in a way that cannot be worked on."""
    parameter = part.parameter()
    if is_sharded(parameter):
        _work(part, parameter, whole=False)


@contextmanager
def explaining_flat_weights(model: nn.Module) -> Iterator[None]:
    """Where heads cannot be found in a model under FSDP1, say why: it flattens all weights of a module into one."""
    try:
        yield
    except (NoHeadsFound, UnsupportedWeights) as error:
        kinds = {f"{kind.__module__}.{kind.__name__}" for m in model.modules() for kind in type(m).__mro__}
        if "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel" not in kinds:
            raise
        raise UnsupportedWeights(
            "FullyShardedDataParallel (FSDP1) flattens weights, so that heads cannot be found in them; shard with "
            "torch.distributed.fsdp.fully_shard (FSDP2) instead"
        ) from error


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
        sums: mesh dimensions over which products are summed; their process groups are looked up when needed, so that
            nothing here keeps a destroyed one alive.
        columns: number of each local column among all columns, int64 [columns here]; a column is one input feature.
            It follows from the others, so that it takes no part in comparisons.
    """

    placements: tuple[Placement, ...]
    work: tuple[Placement, ...]
    sums: Sums
    columns: Tensor = field(compare=False)


def layout_of(part: HeadSlice, parameter: DTensor, whole: bool = False) -> Layout:
    """How the weight of a slice is worked on.

    Args:
        part: the slice.
        parameter: its parameter.
        whole: every column on every rank, for rules that need whole particles.

    Raises:
        UnsupportedWeights: it is spread in a way that cannot be worked on.
    """
    mesh, placements = parameter.device_mesh, tuple(parameter.placements)
    work = _work(part, parameter, whole)
    sums = tuple((mesh, i) for i, placement in enumerate(work) if _dim(placement) is not None)
    _check_rows(part, parameter)
    shape = list(parameter.shape)
    shape[part.axis] = 1
    numbers = torch.arange(math.prod(shape), device=parameter.device).view(shape)
    columns = local_part(numbers, mesh, work).flatten()
    if work == placements and columns.numel() * parameter.shape[part.axis] != parameter.to_local().numel():
        raise UnsupportedWeights(_refusal(part, parameter, "torch cannot say which columns lie on this rank"))
    return Layout(placements, work, sums, columns)


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


def _check_rows(part: HeadSlice, parameter: DTensor) -> None:
    """Interleaved shards (FSDP over tensor parallel, in one dimension) are only as good as torch's own account."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    along = [p if _dim(p) == part.axis else Replicate() for p in parameter.placements]
    if all(type(p).__name__ in ("Shard", "Replicate") for p in along):
        return
    shape = [1] * parameter.ndim
    shape[part.axis] = parameter.shape[part.axis]
    numbers = torch.arange(parameter.shape[part.axis], device=parameter.device).view(shape)
    here = local_part(numbers, mesh, along)
    again = DTensor.from_local(here, mesh, along, run_check=False, shape=numbers.shape, stride=numbers.stride())
    if here.numel() != parameter.to_local().shape[part.axis] or not torch.equal(again.full_tensor(), numbers):
        raise UnsupportedWeights(_refusal(part, parameter, "this version of torch does not move such shards rightly"))


def local_part(numbers: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """What of `numbers`, which every rank has, a rank would hold: a slice, nothing is sent."""
    from torch.distributed.tensor import DTensor, Replicate

    whole = DTensor.from_local(numbers, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=placements).to_local()


def _dim(placement: Placement) -> int | None:
    """The dimension a placement shards, interleaved ones included; None for copies and partial sums."""
    dim: int | None = getattr(placement, "dim", None)
    return dim


def _where(tensor: Tensor) -> str:
    return f"{tuple(tensor.placements)} on {tensor.device_mesh}" if is_sharded(tensor) else "a plain tensor"


def _refusal(part: HeadSlice, parameter: DTensor, why: str) -> str:
    return f"{part.parameter_name}: sharded as {tuple(parameter.placements)}: {why}; {_ADVICE}"
