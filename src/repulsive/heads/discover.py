"""Find the attention heads of a model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from torch import Tensor, nn

from repulsive.errors import HeadLayoutError, NoHeadsFound, SelectionError
from repulsive.heads.families import FAMILIES
from repulsive.heads.infer import Completed, complete, refuse_wrong
from repulsive.heads.known import dotted, known_heads
from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.heads.match import follow, kinds_of, weights_of
from repulsive.heads.place import clean, module_of, number_layers, stack_of, unwrap, where_of
from repulsive.heads.rows import rows_of
from repulsive.heads.select import LayersName, Particle, Where, select

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
            proves every slice and finds heads in classes the family table does not know.
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
        if completed.untraced:
            warnings.warn(
                "these heads come from the family table and the example did not reach them: "
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


def heads_by_hand(model: nn.Module, heads: Mapping[str, tuple[str, int] | tuple[str, Tensor]]) -> list[HeadGroup]:
    """Name the heads of an attention class that is neither in the table nor traceable.

    Args:
        model: the model.
        heads: projection's dotted name -> (part, number of heads), or (layout, number of heads) for a packed
            projection, or (part, rows) with an int64 table [heads, features].

    Returns:
        One group per part of each projection, in the order given.

    Raises:
        HeadLayoutError: no projection has that name, or it does not divide into that many heads.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 6))
        >>> [g.name for g in heads_by_hand(model, {"0": ("qkv head dim", 1)})]
        ['q', 'k', 'v']
    """
    inner = unwrap(model)
    groups: list[HeadGroup] = []
    for path, (layout, count) in heads.items():
        if follow(inner, path) is None:
            raise HeadLayoutError(f"{path!r} is neither a projection nor a parameter of the model")
        weights = weights_of(inner, path)
        spelt = layout if " " in layout else f"{layout} head dim"
        for part in ("q", "k", "v"):
            slices = []
            for weight in weights:
                table = {layout: count} if isinstance(count, Tensor) else rows_of(spelt, weight.features, count)
                if part in table:
                    slices.append(HeadSlice(weight.module, weight.attribute, weight.path, table[part], weight.axis))
            if slices:
                parent = path.rpartition(".")[0]
                name = dotted(clean(parent), part)
                if any(g.name == name for g in groups):
                    name = dotted(clean(path), part)
                place = where_of(inner, parent)
                groups.append(HeadGroup(name, 0, part, place, stack_of(path), "by hand", tuple(slices)))
    if not groups:
        raise NoHeadsFound("heads_by_hand: no part named; use ('q', number of heads) or a layout with q, k or v in it")
    return number_layers(groups, [module_of(g) for g in groups])


def _strided(group: HeadGroup) -> HeadGroup:
    """The same projections sliced as feature c -> particle c mod M."""
    slices = []
    for s in group.slices:
        features = s.rows.flatten().sort().values  # [M * R]
        rows = features.view(-1, s.num_heads).T.contiguous()  # [M, R]
        slices.append(HeadSlice(s.module, s.attribute, s.parameter_name, rows, s.axis))
    return HeadGroup(
        group.name, group.layer, group.part, group.where, group.stack, group.family, tuple(slices), group.serves
    )


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
