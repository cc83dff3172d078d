"""Do heads stay apart between the softmax and the values? Learned talking heads do not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from repulsive.heads.trace.intercept import Leaf
from repulsive.heads.trace.reach import alike

AFTER = "the weights of several heads are mixed after the softmax (talking heads)"
BEFORE = "the scores of a head also draw on rows of another head"
_PRESENT = 1e-12  # share of the largest squared gradient below which a head is not reached


def mixer_before(behind: Iterable[Leaf]) -> str:
    """Name the M x M matrix that mixes the heads' scores, "" where there is none.

    Args:
        behind: the projections that the scores are made from.
    """
    for leaf in behind:
        heads, shape = leaf.tensor.shape[leaf.feature_axis], tuple(leaf.parameter.shape)
        square = shape[:2] == (heads, heads) and leaf.parameter.numel() == heads**2
        if square and heads > 1 and leaf.tensor.ndim > 3:  # additive attention scores [B, T, M] from a matrix as well
            return f"{leaf.name} mixes heads before the softmax (talking heads)"
    return ""


def borrows(roles: Sequence[Mapping[Any, Tensor]], everything: Mapping[Any, Tensor]) -> bool:
    """Do the scores of some head also draw on rows that belong to another head?

    Args:
        roles: for q and for k, squared gradient [indices, rows] of one query of each head, per parameter.
        everything: the same of all queries.
    """
    for key, energy in everything.items():
        tables = [_reached(role[key]) for role in roles if key in role]
        touched = torch.stack([_reached(energy), *tables]).any(0)  # [indices, rows]
        for table in tables:
            numbers = torch.tensor(alike(table))
            owned = torch.stack([table[numbers == n].any(0) for n in range(int(numbers.max()) + 1)])  # [heads, rows]
            if len(owned) > 1 and int(owned.sum(0).max()) == 1:  # not positions, which heads share
                foreign = owned.any(0) & ~owned[numbers] & table.any(1, keepdim=True)  # [indices, rows]
                if bool((touched & foreign).any()):
                    return True
    return False


def _reached(energy: Tensor) -> Tensor:
    return energy > _PRESENT * energy.max(1, keepdim=True).values.clamp(min=1e-300)


def mixes_after(output: Tensor, axes: Sequence[int], weights: Tensor, heads: Sequence[int], ids: list[int]) -> bool:
    """Does one place of `output` draw on the attention weights of all heads, or of heads that others share in part?

    Args:
        output: what left the heads, attention weights times values.
        axes: its axes that may count heads.
        weights: what left the softmax, a leaf.
        heads: the axes of `weights` that count heads.
        ids: for each index of those axes, which head it is.
    """
    drawn = [_drawn(output, place, weights, heads, ids) for place in _places(output, axes)]
    sets = {each for each in drawn if each}
    everything = frozenset(ids)
    return any(
        len(one) > 1 and (one == everything or any(one & other and one != other for other in sets)) for one in sets
    )


def _places(output: Tensor, axes: Sequence[int]) -> list[dict[int, int]]:
    """Some positions along each axis, the others at their first."""
    first = dict.fromkeys(axes, 0)
    return [
        first | {axis: place}
        for axis in axes
        for place in sorted({0, 1, output.shape[axis] // 2, output.shape[axis] - 1})
        if place < output.shape[axis]
    ]


def _drawn(
    output: Tensor, place: dict[int, int], weights: Tensor, heads: Sequence[int], ids: list[int]
) -> frozenset[int]:
    """The heads whose attention weights one position of the output depends on."""
    index = tuple(place.get(axis, slice(None)) for axis in range(output.ndim))
    noise = torch.randn(output[index].shape, generator=torch.Generator().manual_seed(1)).to(output)
    (grad,) = torch.autograd.grad(output[index], weights, noise, retain_graph=True, allow_unused=True)
    if grad is None:
        return frozenset()
    others = [axis for axis in range(weights.ndim) if axis not in heads]
    energy = grad.double().square().sum(others).flatten().cpu()  # [indices]
    return frozenset(ids[i] for i in (energy > _PRESENT * energy.max()).nonzero().flatten().tolist())
