"""Detect attention that mixes heads before or after the softmax, such as talking-heads attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from repulsive.heads.trace.gradients import PRESENT, same_head_ids
from repulsive.heads.trace.records import Leaf

AFTER = "the attention weights of several heads are mixed after the softmax (talking heads)"
CHANNELS = "the softmax is over channels, not tokens"
BESIDE = "the output of a head also depends on queries or keys of another head"
BEFORE = "the scores of a head also depend on rows of another head"


def mixing_matrix(leaves: Iterable[Leaf], sizes: Sequence[int]) -> str:
    """Find the M x M matrix that mixes the scores of M heads, and return its name; "" if nothing mixes them.

    Args:
        leaves: the projections that the scores, or the products of attention weights and values, are computed from.
        sizes: the sizes of those axes of the scores that count heads.
    """
    for leaf in leaves:
        heads, shape = leaf.tensor.shape[leaf.feature_axis], tuple(leaf.parameter.shape)
        is_square = shape[:2] == (heads, heads) and leaf.parameter.numel() == heads**2
        # Additive attention also makes scores [B, T, M] from a matrix that may be square; those have three axes.
        counts_heads = any(size % heads == 0 for size in sizes)  # a multiple, if heads and samples share an axis
        if is_square and heads > 1 and leaf.tensor.ndim > 3 and counts_heads:
            return leaf.name
    return ""


def uses_foreign_rows(roles: Sequence[Mapping[Any, Tensor]], all_queries: Mapping[Any, Tensor]) -> bool:
    """Check whether the scores of some head also depend on rows that belong to another head.

    Args:
        roles: for q and for k, squared gradient [indices, rows] of one query of each head, per parameter.
        all_queries: the squared gradient [indices, rows] of all queries together, per parameter.
    """
    for key, energy in all_queries.items():
        tables = [_reached(role[key]) for role in roles if key in role]
        touched = torch.stack([_reached(energy), *tables]).any(0)  # [indices, rows]
        for table in tables:
            ids = torch.tensor(same_head_ids(table), device="cpu")
            owned = torch.stack([table[ids == n].any(0) for n in range(int(ids.max()) + 1)])  # [heads, rows]
            if len(owned) > 1 and int(owned.sum(0).max()) == 1:  # rows that heads share, such as positions, are fine
                foreign = owned.any(0) & ~owned[ids] & table.any(1, keepdim=True)  # [indices, rows]
                if bool((touched & foreign).any()):
                    return True
    return False


def bypasses_weights(scores: Sequence[Mapping[Any, Tensor]], output: Mapping[Any, Tensor]) -> bool:
    """Check whether an output depends on queries or keys of several heads other than through the attention weights.

    Args:
        scores: for q and for k, squared gradient [indices, rows] of the scores of each head, per parameter.
        output: squared gradient [indices, rows] of each index of attention weights times values, with the weights held
            constant.
    """
    for role in scores:
        for key in role.keys() & output.keys():
            table = _reached(role[key])
            ids = torch.tensor(same_head_ids(table), device="cpu")
            owned = torch.stack([table[ids == n].any(0) for n in range(int(ids.max()) + 1)])  # [heads, rows]
            owned &= owned.sum(0) == 1  # rows that heads share, such as positions, are fine
            heads_used = (_reached(output[key]).unsqueeze(1) & owned).any(2).sum(1)  # [indices]
            if int(heads_used.max()) > 1:
                return True
    return False


def _reached(energy: Tensor) -> Tensor:
    return energy > PRESENT * energy.max(1, keepdim=True).values.clamp(min=1e-300)


def mixes_after(output: Tensor, axes: Sequence[int], weights: Tensor, heads: Sequence[int], ids: list[int]) -> bool:
    """Check whether one position of `output` depends on all heads' attention weights, or on overlapping sets of heads.

    Args:
        output: attention weights times values.
        axes: the axes of `output` that may count heads.
        weights: the output of the softmax, a leaf tensor.
        heads: the axes of `weights` that count heads.
        ids: the head number at each index of those axes.
    """
    used = [_heads_used(output, position, weights, heads, ids) for position in _positions(output, axes)]
    sets = {each for each in used if each}
    every_head = frozenset(ids)
    return any(
        len(one) > 1 and (one == every_head or any(one & other and one != other for other in sets)) for one in sets
    )


def _positions(output: Tensor, axes: Sequence[int]) -> list[dict[int, int]]:
    """Choose a few positions along each axis, with the other axes at index 0."""
    first = dict.fromkeys(axes, 0)
    return [
        first | {axis: position}
        for axis in axes
        for position in sorted({0, 1, output.shape[axis] // 2, output.shape[axis] - 1})
        if position < output.shape[axis]
    ]


def _heads_used(
    output: Tensor, position: dict[int, int], weights: Tensor, heads: Sequence[int], ids: list[int]
) -> frozenset[int]:
    """Find the heads whose attention weights affect one position of the output."""
    index = tuple(position.get(axis, slice(None)) for axis in range(output.ndim))
    noise = torch.randn(output[index].shape, generator=torch.Generator().manual_seed(1), device="cpu").to(output)
    (grad,) = torch.autograd.grad(output[index], weights, noise, retain_graph=True, allow_unused=True)
    if grad is None:
        return frozenset()
    others = [axis for axis in range(weights.ndim) if axis not in heads]
    energy = grad.double().square().sum(others).flatten().cpu()  # [indices]
    return frozenset(ids[i] for i in (energy > PRESENT * energy.max()).nonzero().flatten().tolist())
