"""Layout of sharded weights: the part of every head that a rank works on.

A rule needs two things of a group: its Gram matrix, which is a sum over the elements of a head, and the same linear
combination for every element. So each rank can work on any split *within* heads: it combines its own elements, and
M x M products are summed over ranks. A weight sharded along its input dimension is already split like this. A weight
sharded along its output features (`axis`) has whole heads on different ranks. It is first moved to a split within
heads, and its gradient is moved back afterwards: an all-to-all of the rank's own share, not a gather of everything.
`docs/scaling.md` has the costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from repulsive.errors import UnsupportedWeights
from repulsive.heads.layout import HeadSlice
from repulsive.heads.sharded_tensors import is_sharded

if TYPE_CHECKING:  # torch.distributed.tensor is imported only where weights are sharded
    from torch.distributed.tensor import DeviceMesh, DTensor, Placement

MeshDims = tuple[tuple["DeviceMesh", int], ...]

_ADVICE = "use fully_shard(..., shard_placement_fn=head_placement(model)): every rank then has a piece of every head"


def check_placement(part: HeadSlice) -> None:
    """Raise `UnsupportedWeights` if the weight of a slice is sharded in an unsupported way."""
    parameter = part.parameter()
    if is_sharded(parameter):
        _work_placements(part, parameter, whole=False)


def has_heads_on_other_ranks(part: HeadSlice) -> bool:
    """Check whether whole heads lie on different ranks, so that the weight must be moved before a rule is applied."""
    parameter = part.parameter()
    return is_sharded(parameter) and any(_sharded_dim(p) == part.axis for p in parameter.placements)


def local_size(part: HeadSlice) -> int:
    """Return the number of elements of the parameter on this rank."""
    parameter = part.parameter()
    return parameter.to_local().numel() if is_sharded(parameter) else parameter.numel()


def largest_share(part: HeadSlice) -> int:
    """Return the number of elements of the parameter on the rank that stores most of them, a number equal on all ranks.

    Ranks that split work by their own sizes could disagree, and wait for each other for ever.
    """
    parameter = part.parameter()
    shape = list(parameter.shape)
    if is_sharded(parameter):
        for mesh_dim, placement in enumerate(parameter.placements):
            dim = _sharded_dim(placement)
            if dim is not None:
                shape[dim] = -(-shape[dim] // parameter.device_mesh.size(mesh_dim))
    return math.prod(shape)


def splits_one_dimension(part: HeadSlice) -> bool:
    """Check whether each rank works on one range of one dimension of a sharded weight, the same answer on all ranks."""
    parameter = part.parameter()
    if not is_sharded(parameter):
        return True
    work = _work_placements(part, parameter, whole=False)
    kinds = {type(placement).__name__ for placement in work}
    return kinds <= {"Shard", "Replicate"} and len({_sharded_dim(p) for p in work} - {None}) <= 1


@dataclass(frozen=True)
class ShardLayout:
    """How a sharded parameter is stored over ranks, and how it is split while a rule works on it.

    Args:
        placements: how it is stored, one placement per mesh dimension.
        work_placements: how it is split for the rule: never along the output features.
        summed_dims: mesh dimensions over which products are summed. Their process groups are looked up when needed, so
            that no destroyed one is kept alive.
        columns: index of each local column among all columns, int64 [local columns]; a column is one input feature.
            It follows from the other fields, so it is not compared.
    """

    placements: tuple[Placement, ...]
    work_placements: tuple[Placement, ...]
    summed_dims: MeshDims
    columns: Tensor = field(compare=False)


def shard_layout(part: HeadSlice, parameter: DTensor, whole: bool = False) -> ShardLayout:
    """Determine how the weight of a slice is split over ranks while a rule works on it.

    Args:
        part: the slice.
        parameter: the parameter that contains the slice.
        whole: move all columns to every rank, for rules that need whole particles.

    Raises:
        UnsupportedWeights: the weight is sharded in an unsupported way.
    """
    mesh, placements = parameter.device_mesh, tuple(parameter.placements)
    work = _work_placements(part, parameter, whole)
    summed = tuple((mesh, i) for i, placement in enumerate(work) if _sharded_dim(placement) is not None)
    _check_interleaved_rows(part, parameter)
    shape = list(parameter.shape)
    shape[part.axis] = 1
    numbers = torch.arange(math.prod(shape), device=parameter.device).view(shape)
    columns = local_part(numbers, mesh, work).flatten()
    if work == placements and columns.numel() * parameter.shape[part.axis] != parameter.to_local().numel():
        raise UnsupportedWeights(_refusal(part, parameter, "torch does not report which columns lie on this rank"))
    return ShardLayout(placements, work, summed, columns)


def gradient_of(part: HeadSlice) -> Tensor:
    """Return the gradient of a slice's parameter, moved to the placements of the parameter if necessary.

    Raises:
        UnsupportedWeights: there is no gradient, it is sparse, or it lies on another mesh.
    """
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
            f"{name}: the weight is distributed as {_describe(parameter)} and its gradient as {_describe(grad)}; "
            "both must lie on one mesh"
        )
    if is_sharded(parameter) and is_sharded(grad) and parameter.placements != grad.placements:
        # Partial sums, or other placements chosen by autograd: optimizers would move it implicitly at every use.
        parameter.grad = grad = grad.redistribute(placements=parameter.placements)
    return grad


def _work_placements(part: HeadSlice, parameter: DTensor, whole: bool) -> tuple[Placement, ...]:
    """Choose the work placements: a split of the output features becomes a split of the largest other dimension."""
    from torch.distributed.tensor import Replicate, Shard

    others = [dim for dim in range(parameter.ndim) if dim != part.axis]
    work: list[Placement] = []
    for placement in parameter.placements:
        if not placement.is_replicate() and _sharded_dim(placement) is None:
            raise UnsupportedWeights(_refusal(part, parameter, f"{placement} is neither a shard nor a copy"))
        if whole or placement.is_replicate() or not others:
            work.append(Replicate())
        elif _sharded_dim(placement) == part.axis:
            work.append(Shard(max(others, key=lambda dim: parameter.shape[dim])))
        else:
            work.append(placement)
    return tuple(work)


def _check_interleaved_rows(part: HeadSlice, parameter: DTensor) -> None:
    """Check that torch moves interleaved shards correctly (FSDP over tensor parallel in one dimension)."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    along = [p if _sharded_dim(p) == part.axis else Replicate() for p in parameter.placements]
    if all(type(p).__name__ in ("Shard", "Replicate") for p in along):
        return
    numbers = _row_numbers(part, parameter)
    here = local_part(numbers, mesh, along)
    again = DTensor.from_local(here, mesh, along, run_check=False, shape=numbers.shape, stride=numbers.stride())
    if here.numel() != parameter.to_local().shape[part.axis] or not torch.equal(again.full_tensor(), numbers):
        raise UnsupportedWeights(_refusal(part, parameter, "this version of torch moves such shards incorrectly"))


def local_rows(part: HeadSlice, parameter: DTensor) -> Tensor:
    """Return the output features that this rank stores, in order: int64 [stored features]."""
    from torch.distributed.tensor import Replicate

    along = [p if _sharded_dim(p) == part.axis else Replicate() for p in parameter.placements]
    return local_part(_row_numbers(part, parameter), parameter.device_mesh, along).flatten()


def _row_numbers(part: HeadSlice, parameter: DTensor) -> Tensor:
    shape = [1] * parameter.ndim
    shape[part.axis] = parameter.shape[part.axis]
    return torch.arange(parameter.shape[part.axis], device=parameter.device).view(shape)


def local_part(numbers: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """Return this rank's part of a tensor that is equal on every rank, without communication."""
    from torch.distributed.tensor import DTensor, Replicate

    whole = DTensor.from_local(numbers, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=placements).to_local()


def _sharded_dim(placement: Placement) -> int | None:
    """Return the dimension that a placement shards, also for interleaved shards; None for copies and partial sums."""
    dim: int | None = getattr(placement, "dim", None)
    return dim


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.placements)} on {tensor.device_mesh}" if is_sharded(tensor) else "a plain tensor"


def _refusal(part: HeadSlice, parameter: DTensor, why: str) -> str:
    return f"{part.parameter_name}: sharded as {tuple(parameter.placements)}: {why}; {_ADVICE}"
