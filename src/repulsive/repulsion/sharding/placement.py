"""FSDP2 placements that make repulsion cheap: every rank holds a piece of every head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from repulsive.errors import UnsupportedWeights
from repulsive.heads import find_heads
from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.heads.sharded_tensors import is_sharded

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh, Shard


def head_placement(
    model: nn.Module, *, mesh: DeviceMesh | None = None, groups: Sequence[HeadGroup] | None = None
) -> Callable[[nn.Parameter], Shard | None]:
    """Build a `shard_placement_fn` for `fully_shard` that splits weights of heads along their input features.

    Ranks then exchange only M x M inner products. Every other parameter keeps torch's default placement.

    Args:
        model: the model, before `fully_shard`; tensor parallelism may have been applied already.
        mesh: the mesh that `fully_shard` will get; None for all ranks. The last dimension of a two-dimensional mesh
            (HSDP) is the one that shards.
        groups: groups of heads from `find_heads` or made by hand; None for all groups that `find_heads(model)` finds.

    Returns:
        A function parameter -> `Shard(dim)`, or None for torch's default.

    Raises:
        UnsupportedWeights: a weight does not divide evenly, which torch requires of every dimension but the first.

    Example:
        `for layer in model.layers: fully_shard(layer, shard_placement_fn=placement)`, then the same for `model`.
    """
    from torch.distributed.tensor import Shard

    shards = _world_size() if mesh is None else mesh.size(mesh.ndim - 1)
    chosen: dict[int, Shard] = {}
    for group in find_heads(model) if groups is None else groups:
        for part in group.slices:
            dim = _dimension_to_split(part, shards)
            if dim is not None:
                chosen[id(part.parameter())] = Shard(dim)

    def placement(parameter: nn.Parameter) -> Shard | None:
        return chosen.get(id(parameter))

    return placement


def _dimension_to_split(part: HeadSlice, shards: int) -> int | None:
    """Find the first dimension, other than the output features, that splits evenly; dimension 0 may be uneven."""
    parameter = part.parameter()
    shape = parameter.to_local().shape if is_sharded(parameter) else parameter.shape
    others = [dim for dim in range(parameter.ndim) if dim != part.axis]
    for dim in others:
        if dim == 0 or shape[dim] % shards == 0:
            return dim
    if not others:
        return None
    raise UnsupportedWeights(
        f"{part.parameter_name}: {tuple(shape)} cannot be split along its input features over {shards} ranks: "
        f"{' and '.join(str(shape[dim]) for dim in others)} do not divide by {shards}, and torch shards only dimension "
        "0 unevenly; choose another number of ranks, or shard this layer by torch's default (repulsion works with it, "
        "and sends more)"
    )


def _world_size() -> int:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        raise UnsupportedWeights("head_placement: no process group yet; call init_process_group, or give `mesh`")
    return distributed.get_world_size()
