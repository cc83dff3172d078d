"""Select groups of heads by layer, part (q, k, v), place (encoder, decoder, cross) and name; join parts into heads."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Literal, get_args

import torch

from repulsive.errors import SelectionError, did_you_mean
from repulsive.heads.layout import PROOFS, HeadGroup, HeadSlice
from repulsive.heads.module_paths import module_of

LayersName = Literal["all", "first", "last"]
Where = Literal["all", "encoder", "decoder", "cross"]
Particle = Literal["projection", "head"]
Parts = Literal["q", "k", "v", "qk", "qv", "kv", "qkv"]


def select(
    groups: Sequence[HeadGroup],
    *,
    layers: LayersName | Sequence[int] = "all",
    parts: Parts = "qkv",
    where: Where = "all",
    particle: Particle = "projection",
    match: str | Sequence[str] | None = None,
) -> list[HeadGroup]:
    """Select groups by layer, part, place and name; arguments as in `find_heads`.

    Raises:
        SelectionError: a value is unknown, a layer is out of range, or no group matches.
    """
    check_words(layers, parts, where, particle, match)
    chosen = _by_place(groups, where)
    chosen = [g for g in chosen if set(g.part) & set(parts)]
    chosen = _by_layer(chosen, layers) if chosen else chosen
    if match is not None:
        patterns = [match] if isinstance(match, str) else list(match)
        unused = [p for p in patterns if not any(fnmatchcase(g.name, p) for g in chosen)]
        if 0 < len(unused) < len(patterns):
            raise SelectionError(
                f"match={match!r}: no group of the selected layers and parts matches {unused[0]!r}; the model has "
                + _available(groups, match)
            )
        chosen = [g for g in chosen if any(fnmatchcase(g.name, p) for p in patterns)]
    if not chosen:
        raise SelectionError(
            f"layers={layers!r}, parts={parts!r}, where={where!r}, match={match!r} select no heads; the model has "
            + _available(groups, match)
        )
    return join_heads(chosen) if particle == "head" else chosen


def check_words(
    layers: object = "all",
    parts: object = "qkv",
    where: object = "all",
    particle: object = "projection",
    match: object = None,
) -> None:
    """Check the words of a selection; indices of layers depend on the model and are not checked.

    Raises:
        SelectionError: a word is unknown, or a pattern is not a string.
    """
    if isinstance(layers, str):
        _check_choice("layers", layers, get_args(LayersName))
    elif not isinstance(layers, Iterable):
        example = layers if isinstance(layers, int) and not isinstance(layers, bool) else 0
        raise SelectionError(
            f"layers={layers!r}: expected 'all', 'first', 'last' or a list of indices, such as [{example}]"
        )
    _check_choice("where", where, get_args(Where))
    _check_choice("particle", particle, get_args(Particle))
    if not isinstance(parts, str) or not parts or set(parts) - set("qkv"):
        raise SelectionError(f"parts={parts!r} is unknown; use any of the letters q, k, v, such as 'qk'")
    patterns = match if isinstance(match, Sequence) else () if match is None else (match,)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise SelectionError(f"match={match!r}: expected a pattern or a list of patterns, such as '*.layer.0.*'")


def join_heads(groups: Sequence[HeadGroup]) -> list[HeadGroup]:
    """Join q, k and v of each attention module into one particle per head, or per kv head with the q heads it serves.

    Raises:
        SelectionError: the parts of a module cannot be paired head by head.
    """
    modules: dict[str, list[HeadGroup]] = {}
    for group in groups:
        modules.setdefault(module_of(group), []).append(group)
    return [_joined(name, parts) for name, parts in modules.items()]


def _joined(module: str, groups: list[HeadGroup]) -> HeadGroup:
    fewest = min(group.num_heads for group in groups)
    slices: list[HeadSlice] = []
    for group in groups:
        if group.num_heads == fewest:
            slices.extend(group.slices)
        else:
            slices.extend(_served(s, group, fewest) for s in group.slices)
    first = groups[0]
    part = "".join(group.part for group in groups)
    name = module or part
    proof = min((group.proof for group in groups), key=PROOFS.index)
    return HeadGroup(name, first.layer, part, first.where, first.stack, first.family, tuple(slices), proof=proof)


def _served(s: HeadSlice, group: HeadGroup, kv_heads: int) -> HeadSlice:
    """Concatenate the rows of all q heads that one kv head serves: [H, R] -> [H_kv, H / H_kv * R]."""
    serves = torch.tensor(
        group.serves or [h * kv_heads // group.num_heads for h in range(group.num_heads)], device="cpu"
    )
    counts = serves.bincount(minlength=kv_heads)
    if counts.numel() != kv_heads or bool((counts != counts[0]).any()):
        raise SelectionError(
            f"{group.name}: {group.num_heads} heads cannot be divided evenly among {kv_heads} kv heads; "
            "use particle='projection'"
        )
    order = serves.argsort(stable=True)
    return HeadSlice(s.module, s.attribute, s.parameter_name, s.rows[order].reshape(kv_heads, -1), s.axis)


def _by_place(groups: Sequence[HeadGroup], where: str) -> list[HeadGroup]:
    """Select groups by `where`; in a model with one stack of layers, "encoder" and "decoder" both mean that stack."""
    if where == "all":
        return list(groups)
    self_attention = [g for g in groups if g.where != "cross"]
    if where != "cross" and len({g.stack for g in self_attention}) == 1:
        return self_attention
    return [g for g in groups if g.where == where]


def _by_layer(groups: list[HeadGroup], layers: LayersName | Sequence[int]) -> list[HeadGroup]:
    depth: dict[tuple[str, str], int] = {}
    for g in groups:
        depth[g.stack, g.where] = max(depth.get((g.stack, g.where), 0), g.layer + 1)
    if isinstance(layers, str):
        if layers == "all":
            return groups
        return [g for g in groups if g.layer == (0 if layers == "first" else depth[g.stack, g.where] - 1)]
    deepest = max(depth.values())
    numbers = [operator.index(n) if hasattr(n, "__index__") and not isinstance(n, bool) else n for n in layers]
    wrong = [n for n in numbers if not isinstance(n, int) or isinstance(n, bool) or not -deepest <= n < deepest]
    if wrong:
        raise SelectionError(f"layers={numbers}: {wrong} out of range; use indices from 0 to {deepest - 1}")
    return [g for g in groups if g.layer in numbers or g.layer - depth[g.stack, g.where] in numbers]


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        hint = did_you_mean(value, allowed)
        raise SelectionError(f"{name}={value!r} is unknown; {hint}use one of {', '.join(map(repr, allowed))}")


def _available(groups: Sequence[HeadGroup], match: str | Sequence[str] | None) -> str:
    stacks: dict[tuple[str, str], list[HeadGroup]] = {}
    for group in groups:
        stacks.setdefault((group.stack, group.where), []).append(group)
    lines = [
        f"{stack or '(top)'} ({where}): layers 0 to {max(g.layer for g in members)}, "
        f"parts {''.join(sorted({g.part for g in members}, key='qkv'.find))}"
        for (stack, where), members in stacks.items()
    ]
    if match is not None:
        patterns = [match] if isinstance(match, str) else list(match)
        near = [name for p in patterns for name in get_close_matches(p, [g.name for g in groups], n=2, cutoff=0.3)]
        lines.append("names such as " + ", ".join(near or [groups[0].name]))
    return "; ".join(lines)
