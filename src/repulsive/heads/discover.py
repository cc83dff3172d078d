"""Find the attention heads of a model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, get_args

from torch import nn

from repulsive.errors import NoHeadsFound, SelectionError
from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.heads.place import clean, module_of, unwrap
from repulsive.heads.select import LayersName, Particle, Where, select
from repulsive.heads.table.families import FAMILIES
from repulsive.heads.table.match import kinds_of
from repulsive.heads.table.walk import known_heads
from repulsive.heads.trace.infer import Completed, complete, refuse_wrong

Layout = Literal["heads", "strided"]


def find_heads(
    model: nn.Module,
    example_inputs: object = None,
    *,
    layout: Layout = "heads",
    layers: LayersName | Sequence[int] = "all",
    parts: str = "qkv",
    where: Where = "all",
    particle: Particle = "projection",
    match: str | Sequence[str] | None = None,
) -> list[HeadGroup]:
    """Find the attention heads of a model, as groups that can repel.

    Args:
        model: any module; data-parallel and compile wrappers are seen through.
        example_inputs: a tensor, a tuple of arguments or a mapping of keyword arguments. With it one forward pass
            proves every slice and finds heads in classes the family table does not know. Without it heads of a class
            that is not in the table are a guess from names and shapes: `proof` of each group says which it is.
        layout: "heads", or "strided": feature c in particle c mod M, as one public release has it, for comparison.
        layers: "all", "first" or "last" of each stack, or a list of indices.
        parts: any of the letters q, k, v.
        where: "encoder", "decoder", "cross" or "all".
        particle: "projection" keeps q, k and v apart; "head" joins those of one head into one vector.
        match: patterns (fnmatch) on group names.

    Returns:
        Groups in model order, each with a unique name.

    Raises:
        NoHeadsFound: nothing is known or could be inferred; the message lists near misses.
        SelectionError: heads were found but none was selected.
        HeadLayoutError: an example was given and a slice is not one head.
        UnsupportedWeights: a projection is quantised, parametrised or of an unknown adapter kind.

    Example:
        >>> groups = find_heads(nn.MultiheadAttention(8, 2))
        >>> [(g.part, g.num_heads, g.dim) for g in groups]
        [('q', 2, 32), ('k', 2, 32), ('v', 2, 32)]
    """
    if layout not in get_args(Layout):
        raise SelectionError(f"layout={layout!r} is unknown; use 'heads' or 'strided'")
    inner = unwrap(model)
    groups, misses = known_heads(inner)
    completed: Completed | None = None
    if example_inputs is not None:
        completed = complete(inner, example_inputs, groups)
        misses = {name: reason for name, reason in misses.items() if name not in completed.modules} | completed.misses
        if completed.mixed:
            listed = [f"{report.name} ({report.note})" for report in completed.mixed]
            warnings.warn(f"these are not heads and are left out: {', '.join(listed[:6])}", stacklevel=2)
        if completed.untraced:
            warnings.warn(
                "these heads come from names and shapes, and the example did not reach them: "
                + ", ".join(completed.untraced),
                stacklevel=2,
            )
        groups = completed.groups
    if not groups:
        raise NoHeadsFound(_nothing_found(inner, misses, example_inputs is None))
    chosen = select(groups, layers=layers, parts=parts, where=where, match=match)
    if completed is not None:
        names = {group.name for group in chosen}
        refuse_wrong(report for report in completed.reports if report.name in names)
    if layout == "strided":
        chosen = [_strided(group) for group in chosen]
    return select(chosen, particle=particle)


def _strided(group: HeadGroup) -> HeadGroup:
    """The same projections sliced as feature c -> particle c mod M."""
    slices = []
    for s in group.slices:
        features = s.rows.flatten().sort().values  # [M * R]
        rows = features.view(-1, s.num_heads).T.contiguous()  # [M, R]
        slices.append(HeadSlice(s.module, s.attribute, s.parameter_name, rows, s.axis))
    return replace(group, slices=tuple(slices), proof="guess" if group.proof == "guess" else "given")


def left_out(model: nn.Module, groups: Sequence[HeadGroup]) -> dict[str, str]:
    """Modules that are called attention, in which and around which no heads are known: name -> class.

    Args:
        model: any module.
        groups: heads that were found in it; those of the family table count, too, whether they were selected or not.
    """
    inner = unwrap(model)
    known = {module_of(group) for group in (*known_heads(inner)[0], *groups)}
    found: dict[str, str] = {}
    for name, module in inner.named_modules():
        own = clean(name)
        if _is_called_attention(module) and next(module.parameters(), None) is not None:
            related = any(not a or not b or f"{a}.".startswith(f"{b}.") for x in known for a, b in ((own, x), (x, own)))
            if not related and not any(own.startswith(f"{other}.") for other in found):
                found[own] = type(module).__name__
    return found


def _is_called_attention(module: nn.Module) -> bool:
    return any(word in kind.lower() for kind in kinds_of(module) for word in ("attention", "attn", "mha"))


def _nothing_found(model: nn.Module, misses: Mapping[str, str], untraced: bool) -> str:
    for name, module in model.named_modules():
        if _is_called_attention(module) and clean(name) not in misses:
            misses = {**misses, clean(name): f"{type(module).__name__} is in none of the {len(FAMILIES)} families"}
    listed = [f"  {name or '(the model itself)'}: {reason}" for name, reason in list(misses.items())[:12]]
    lines = [f"no attention heads found in {type(model).__name__}."]
    lines += ["Near misses:", *listed] if listed else ["No module looks like attention."]
    if untraced:
        lines.append("Pass example inputs, find_heads(model, example_inputs), to have them traced, or")
    lines.append('name them by hand: heads_by_hand(model, {"layers.0.attn.wq": ("q", 8), ...}).')
    return "\n".join(lines)
