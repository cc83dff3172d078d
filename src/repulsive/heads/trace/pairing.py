"""Pair query heads with the key-value heads that serve them, as observed in the attention calls of a trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.heads.module_paths import clean, module_of
from repulsive.heads.trace.gradients import PRESENT, RoleGradients

_TOLERANCE = 1e-6  # largest share of an index's squared gradient outside its head


def with_traced_pairs(
    model: nn.Module, groups: Sequence[HeadGroup], calls: Iterable[Sequence[RoleGradients]]
) -> list[HeadGroup]:
    """Set `serves` of grouped query heads to the pairs seen in the traced calls; leave other groups unchanged."""
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


def pairing_fault(group: HeadGroup, calls: Iterable[Sequence[RoleGradients]], names: Mapping[int, str]) -> str:
    """Describe how an attention call contradicts the q, k, v pairing of a joined group; "" if no call does."""
    for call in calls:
        paired: dict[int, tuple[int, str]] = {}  # index of the call -> head, and the parameter that showed it
        uses = ((s, _heads_used(s, role, names)) for s in group.slices for role in call)
        for name, index, head in ((s.parameter_name, *use) for s, heads in uses for use in heads.items()):
            other, parameter = paired.setdefault(index, (head, name))
            if other != head:
                return (
                    f"attention pairs head {other} of {parameter} with head {head} of {name}; in the joined heads "
                    "both have the same number"
                )
    return ""


def _serves(
    q: HeadGroup, partners: Sequence[HeadGroup], calls: Iterable[Sequence[RoleGradients]], names: Mapping[int, str]
) -> tuple[int, ...] | None:
    """Find the kv head of each q head; None if calls do not show it or disagree, or if no kv head is shared."""
    fewer = [group for group in partners if group.num_heads < q.num_heads]
    pairs: dict[int, set[int]] = {}
    for call in calls:
        for queries in _each(q, call, names):
            for served in (heads for group in fewer for heads in _each(group, call, names)):
                for index in queries.keys() & served.keys():
                    pairs.setdefault(queries[index], set()).add(served[index])
    if set(pairs) != set(range(q.num_heads)) or any(len(served) > 1 for served in pairs.values()):
        return None
    return tuple(pairs[head].pop() for head in range(q.num_heads))


def _each(group: HeadGroup, call: Sequence[RoleGradients], names: Mapping[int, str]) -> Iterator[dict[int, int]]:
    """Yield a map from the call's indices to heads, for each slice and each role that uses the slice."""
    for s in group.slices:
        for role in call:
            if role.role == group.part and (heads := _heads_used(s, role, names)):
                yield heads


def _heads_used(s: HeadSlice, role: RoleGradients, names: Mapping[int, str]) -> dict[int, int]:
    """Map each index of the call to the head of slice `s` that it uses; empty if the role uses other rows."""
    energy = role.energy.get((names.get(id(s.parameter()), s.parameter_name), s.axis))
    if energy is None or role.total < 2:
        return {}
    mine = head_energy(s, energy)  # [indices, M]
    reached = energy > PRESENT * energy.max(1, keepdim=True).values.clamp(min=1e-300)
    common = reached.all(0)
    common[s.rows.flatten().cpu()] = False
    total = energy[:, ~common].sum(1)
    fits = (total > 0) & (mine.max(1).values >= (1 - _TOLERANCE) * total)
    if not bool(fits.any()):
        return {}
    heads = mine.argmax(1).tolist()
    return {index: heads[i] for i, index in enumerate(role.indices) if bool(fits[i])}


def head_energy(s: HeadSlice, energy: Tensor) -> Tensor:
    """Sum squared gradients over the rows of each head: [indices, rows of the parameter] -> [indices, M]."""
    return torch.stack([energy[:, rows].sum(1) for rows in s.rows.cpu()], 1)
