"""What attention calls draw from projections: the record of a trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Key = tuple[str, int]  # a parameter's dotted name and the axis that counts its output features
_MANY = 64  # indices of a call, beyond which they are looked at for a period
_CHECKPOINTS = (32, 64, 128, 256)
PRESENT = 1e-12  # share of the largest squared gradient below which a feature is not reached


@dataclass(frozen=True, eq=False)
class Reach:
    """What one role (q, k, v) of one attention call draws from the projections behind it.

    Args:
        role: "q", "k" or "v"; "any" where a call does not tell them apart (graph convolutions).
        owner: dotted name of the module that made the call.
        energy: per parameter, squared gradient [indices, rows], float64; an index is one head of the call, or one
            (sample, head) pair where the model merges them.
        held: widths of the norms whose statistics were held constant on the way.
        mixed: what mixes the heads of this role with each other, "" where nothing does.
        indices: which indices of the call the lines of `energy` are, out of `total`: where hundreds of them repeat
            the same heads, as windows do, a few periods are enough.
    """

    role: str
    owner: str
    energy: dict[Key, Tensor]
    held: frozenset[int]
    mixed: str = ""
    indices: tuple[int, ...] = ()
    total: int = 0


@dataclass(frozen=True, eq=False)
class Trace:
    """What one forward pass showed.

    Args:
        calls: for each attention call, in order, the reach of its roles. With one token q and k get no gradient.
        hidden: module -> why attention in it could not be followed.
    """

    calls: list[list[Reach]]
    hidden: dict[str, str]


def gather(
    indices: list[tuple[int, ...]], drawn: Callable[[tuple[int, ...]], list[dict[Key, Tensor]]]
) -> tuple[tuple[int, ...], list[dict[Key, Tensor]]]:
    """Energy [indices, rows] of each role, and which indices: all, or two periods and the last of many that repeat."""
    lines: list[list[dict[Key, Tensor]]] = []
    taken = list(range(len(indices)))
    for i, index in enumerate(indices):
        lines.append(drawn(index))
        if len(indices) > _MANY and i + 1 in _CHECKPOINTS and (period := _period(lines, len(indices))):
            taken = [*range(2 * period), *range(len(indices) - period, len(indices))]
            lines = [*lines[: 2 * period], *(drawn(indices[j]) for j in taken[2 * period :])]
            break
    stacked = [{key: torch.stack([one[key] for one in role]) for key in role[0]} for role in zip(*lines, strict=True)]
    return tuple(taken), [{key: e for key, e in energy.items() if e.any()} for energy in stacked]


def _period(lines: list[list[dict[Key, Tensor]]], total: int) -> int:
    """After how many indices the same heads come again, seen twice; 0 where they do not."""
    energies = [[energy for role in line for energy in role.values()] for line in lines]
    reached = torch.stack([torch.cat([e > PRESENT * e.max() for e in each]) for each in energies])
    if not bool(reached.any(1).all()):
        return 0  # masked indices say nothing
    numbers = alike(reached)
    for period in range(1, len(numbers) // 2 + 1):
        if total % period == 0 and all(n == numbers[i % period] for i, n in enumerate(numbers)):
            return period if len(set(numbers)) > 1 else 0  # one head for long says nothing about the others
    return 0


def head_ids(energies: list[dict[Key, Tensor]], total: int) -> list[int]:
    """Which head each of a call's indices is, by what its roles draw on; `total` is how many indices the call has."""
    tables = [energy for role in energies for energy in role.values()]
    if not tables:
        return list(range(total))
    numbers = alike(torch.cat([e > PRESENT * e.max(1, keepdim=True).values for e in tables], 1))
    period = len(numbers) // 3 if len(numbers) < total else total  # as `gather` leaves them out
    return [numbers[i % period] for i in range(total)]


def alike(reached: Tensor) -> list[int]:
    """Number the indices of a call so that those which draw on the same features share a number.

    Args:
        reached: bool [indices, features].

    Returns:
        A number per index, counted in order of appearance.
    """
    seen: list[Tensor] = []
    numbers = []
    for features in reached:
        same = (i for i, other in enumerate(seen) if 2 * int((features & other).sum()) > int((features | other).sum()))
        numbers.append(next(same, len(seen)))
        if numbers[-1] == len(seen):
            seen.append(features)
    return numbers
