"""The result of a trace: squared gradients from each head of each attention call to the rows of projections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Key = tuple[str, int]  # a parameter's dotted name and the axis that counts its output features
_MANY = 64  # a call with more indices than this is searched for a repeating pattern
_SEARCH_AT = (32, 64, 128, 256)  # search after this many indices
PRESENT = 1e-12  # a row is reached if its squared gradient exceeds this share of the largest one


@dataclass(frozen=True, eq=False)
class RoleGradients:
    """Squared gradients from one operand (q, k or v, its *role*) of one attention call to the rows of projections.

    Args:
        role: "q", "k" or "v"; "any" where the call does not distinguish them (graph convolutions).
        owner: dotted name of the module that made the call.
        energy: for each parameter, the squared gradient [indices, rows], float64. An index is one head of the call, or
            one (sample, head) pair where the model merges the two axes.
        norm_widths: widths of the norms on the path whose statistics were treated as constants.
        mixed: what mixes the heads of this role with each other; "" if nothing does.
        indices: the call's index for each row of `energy`. Windowed attention repeats the same heads hundreds of
            times; then only a few repetitions are kept.
        total: number of indices of the call.
        has_product: whether the scores contain a product of two activations, as q k^T does; additive attention and
            routers have none.
    """

    role: str
    owner: str
    energy: dict[Key, Tensor]
    norm_widths: frozenset[int]
    mixed: str = ""
    indices: tuple[int, ...] = ()
    total: int = 0
    has_product: bool = True


@dataclass(frozen=True, eq=False)
class Trace:
    """The attention calls of one forward pass.

    Args:
        calls: for each attention call, in order, the gradients of its roles. If the input has one token, q and k get no
            gradient.
        hidden: module name -> why attention inside it could not be traced.
        has_attention: whether the forward pass may contain dot-product attention over tokens. It does not if no matrix
            product of two activations is hidden from the trace or unexplained, and all recorded calls are additive
            or over channels.
    """

    calls: list[list[RoleGradients]]
    hidden: dict[str, str]
    has_attention: bool = True


def gather(
    indices: list[tuple[int, ...]], energy_of: Callable[[tuple[int, ...]], list[dict[Key, Tensor]]]
) -> tuple[tuple[int, ...], list[dict[Key, Tensor]]]:
    """Compute the squared gradients (energy) of every index of a call, or of a few repetitions if the heads repeat.

    Args:
        indices: all indices of the call.
        energy_of: index -> for each role, energy [rows] per parameter.

    Returns:
        The positions in `indices` that were kept (all, or the first two periods and the last one), and for each role
        the energy [kept indices, rows] per parameter.
    """
    lines: list[list[dict[Key, Tensor]]] = []
    kept = list(range(len(indices)))
    for i, index in enumerate(indices):
        lines.append(energy_of(index))
        if len(indices) > _MANY and i + 1 in _SEARCH_AT and (period := _period(lines, len(indices))):
            kept = [*range(2 * period), *range(len(indices) - period, len(indices))]
            lines = [*lines[: 2 * period], *(energy_of(indices[j]) for j in kept[2 * period :])]
            break
    stacked = [{key: torch.stack([one[key] for one in role]) for key in role[0]} for role in zip(*lines, strict=True)]
    return tuple(kept), [{key: e for key, e in energy.items() if e.any()} for energy in stacked]


def _period(lines: list[list[dict[Key, Tensor]]], total: int) -> int:
    """Find the number of indices after which the heads repeat, confirmed by two periods; 0 if they do not repeat."""
    energies = [[energy for role in line for energy in role.values()] for line in lines]
    reached = torch.stack([torch.cat([e > PRESENT * e.max() for e in each]) for each in energies])
    if not bool(reached.any(1).all()):
        return 0  # a masked index reaches no row, so its head is unknown
    ids = same_head_ids(reached)
    for period in range(1, len(ids) // 2 + 1):
        if total % period == 0 and all(n == ids[i % period] for i, n in enumerate(ids)):
            return period if len(set(ids)) > 1 else 0  # one head only: the others may follow later
    return 0


def head_ids(energies: list[dict[Key, Tensor]], total: int) -> list[int]:
    """Find the head number at each of a call's `total` indices from the energies that `gather` returned."""
    tables = [energy for role in energies for energy in role.values()]
    if not tables:
        return list(range(total))
    ids = same_head_ids(torch.cat([e > PRESENT * e.max(1, keepdim=True).values for e in tables], 1))
    period = len(ids) // 3 if len(ids) < total else total  # `gather` keeps three periods
    return [ids[i % period] for i in range(total)]


def same_head_ids(reached: Tensor) -> list[int]:
    """Number the heads of a call: indices whose gradients reach mostly the same rows get the same number.

    Args:
        reached: bool [indices, rows].

    Returns:
        The head number of each index, counted from 0 in order of first appearance.
    """
    rows = reached.float()
    sizes = rows.sum(1)
    heads = torch.empty_like(rows)  # the first index of each head
    head_sizes = torch.empty_like(sizes)
    ids: list[int] = []
    count = 0
    for mine, size in zip(rows, sizes, strict=True):
        common = heads[:count] @ mine  # [heads]
        same = (2 * common > head_sizes[:count] + size - common).nonzero()
        ids.append(int(same[0]) if len(same) else count)
        if ids[-1] == count:
            heads[count], head_sizes[count] = mine, size
            count += 1
    return ids
