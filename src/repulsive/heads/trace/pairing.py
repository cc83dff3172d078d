"""Which key-value head serves which query head: as attention calls pair them, not as names suggest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.heads.place import clean, module_of
from repulsive.heads.trace.reach import PRESENT, Reach

_STRAY = 1e-6  # share of an index's squared gradient that may fall outside its head


def with_traced_pairs(
    model: nn.Module, groups: Sequence[HeadGroup], calls: Iterable[Sequence[Reach]]
) -> list[HeadGroup]:
    """The groups, with `serves` of grouped query heads as the calls of a trace have it."""
    names = {id(p): clean(name) for name, p in model.named_parameters()}
    calls = list(calls)
    partners: dict[str, list[HeadGroup]] = {}
    for group in groups:
        if group.part in ("k", "v"):
            partners.setdefault(module_of(group), []).append(group)
    return [
        replace(group, serves=serves)
        if group.part == "q" and (serves := _serves(group, partners.get(module_of(group), ()), calls, names))
        else group
        for group in groups
    ]


def pairing_fault(group: HeadGroup, calls: Iterable[Sequence[Reach]], names: Mapping[int, str]) -> str:
    """For joined parts: where an attention call pairs other heads than the group does; "" where none does."""
    for call in calls:
        seen: dict[int, tuple[int, str]] = {}  # index of the call -> particle, and the parameter that says so
        for s in group.slices:
            for reach in call:
                for index, head in _heads_drawn(s, reach, names).items():
                    other, parameter = seen.setdefault(index, (head, s.parameter_name))
                    if other != head:
                        return (
                            f"attention pairs head {other} of {parameter} with head {head} of {s.parameter_name}; "
                            "in the joined heads both have the same number"
                        )
    return ""


def _serves(
    q: HeadGroup, partners: Sequence[HeadGroup], calls: Iterable[Sequence[Reach]], names: Mapping[int, str]
) -> tuple[int, ...] | None:
    """The kv head of each q head; None where calls do not show it, contradict each other, or there are as many."""
    fewer = [group for group in partners if group.num_heads < q.num_heads]
    pairs: dict[int, set[int]] = {}
    for call in calls:
        for asked in _each(q, call, names):
            for served in (served for group in fewer for served in _each(group, call, names)):
                for index in asked.keys() & served.keys():
                    pairs.setdefault(asked[index], set()).add(served[index])
    if set(pairs) != set(range(q.num_heads)) or any(len(served) > 1 for served in pairs.values()):
        return None
    return tuple(pairs[head].pop() for head in range(q.num_heads))


def _each(group: HeadGroup, call: Sequence[Reach], names: Mapping[int, str]) -> Iterator[dict[int, int]]:
    """For each slice and fitting role: index of the call -> head."""
    for s in group.slices:
        for reach in call:
            if reach.role == group.part and (drawn := _heads_drawn(s, reach, names)):
                yield drawn


def _heads_drawn(s: HeadSlice, reach: Reach, names: Mapping[int, str]) -> dict[int, int]:
    """Index of the call -> the head of `s` that it draws on; empty where the role draws on other rows."""
    energy = reach.energy.get((names.get(id(s.parameter()), s.parameter_name), s.axis))
    if energy is None or reach.total < 2:
        return {}
    mine = head_energy(s, energy)  # [indices, M]
    reached = energy > PRESENT * energy.max(1, keepdim=True).values.clamp(min=1e-300)
    common = reached.all(0)
    common[s.rows.flatten().cpu()] = False
    total = energy[:, ~common].sum(1)
    fits = (total > 0) & (mine.max(1).values >= (1 - _STRAY) * total)
    if not bool(fits.any()):
        return {}
    heads = mine.argmax(1).tolist()
    return {index: heads[i] for i, index in enumerate(reach.indices) if bool(fits[i])}


def head_energy(s: HeadSlice, energy: Tensor) -> Tensor:
    """Squared gradient of each head: [indices, rows of the parameter] -> [indices, M]."""
    return torch.stack([energy[:, rows].sum(1) for rows in s.rows.cpu()], 1)
