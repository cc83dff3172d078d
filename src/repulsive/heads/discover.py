"""Find the attention heads of a model: `find_heads`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, get_args

from torch import nn

from repulsive.errors import NoHeadsFound, SelectionError, warn_user
from repulsive.heads.flat_weights import refuse_flat_weights
from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.heads.module_paths import check_model, clean, module_of, unwrap
from repulsive.heads.select import LayersName, Particle, Parts, Where, select
from repulsive.heads.table.known_families import known_families
from repulsive.heads.table.lookup import heads_from_table
from repulsive.heads.table.match import kinds_of
from repulsive.heads.trace.infer import Completed, complete
from repulsive.heads.trace.reports import refuse_wrong

Layout = Literal["heads", "strided"]


def check_layout(layout: object) -> None:
    """Check the argument `layout` of `find_heads`.

    Raises:
        SelectionError: the layout is unknown.
    """
    if layout not in get_args(Layout):
        raise SelectionError(f"layout={layout!r} is unknown; use 'heads' or 'strided'")


def find_heads(
    model: nn.Module,
    example_inputs: object = None,
    *,
    layout: Layout = "heads",
    layers: LayersName | Sequence[int] = "all",
    parts: Parts = "qkv",
    where: Where = "all",
    particle: Particle = "projection",
    match: str | Sequence[str] | None = None,
) -> list[HeadGroup]:
    """Find the attention heads of a model, as groups that can repel.

    Args:
        model: any module; data-parallel and compile wrappers are removed.
        example_inputs: a tensor, a tuple of arguments or a mapping of keyword arguments; or the mapping that is the
            only argument of the model, as in sentence-transformers. If given, a forward pass proves every slice and
            infers heads of classes that the family table does not list. If not, heads of such a class are a guess from
            names and shapes, and `proof` of the group says so. The forward pass gathers weights that FSDP2 shards, so
            every rank must pass an example.
        layout: "heads", or "strided" for comparison: feature c belongs to particle c mod M, as in one public release.
        layers: "all", "first" or "last" of each stack, or a list of indices.
        parts: any of the letters q, k, v.
        where: "encoder", "decoder", "cross" or "all". In a model with one stack of layers, "encoder" and "decoder" both
            mean that stack.
        particle: "projection" keeps q, k and v apart; "head" joins those of one head into one vector.
        match: patterns (fnmatch) on group names.

    Returns:
        Groups in model order, each with a unique name.

    Raises:
        NoHeadsFound: the model has no heads that the table lists or the trace infers (the message lists near
            misses), or `torch.jit` or `torch.export` made it.
        SelectionError: heads were found, but none match the selection; or `model` is not an instance of nn.Module.
        HeadLayoutError: an example was given and a slice is not one head.
        UnsupportedWeights: a projection is quantised, parametrised or of an unknown adapter kind, FSDP1 flattens it, or
            an example was given and a weight is tensor parallel.

    Example:
        >>> groups = find_heads(nn.MultiheadAttention(8, 2))
        >>> [(g.part, g.num_heads, g.dim) for g in groups]
        [('q', 2, 32), ('k', 2, 32), ('v', 2, 32)]
    """
    check_layout(layout)
    check_model(model)
    inner = unwrap(model)
    refuse_flat_weights(inner)
    groups, misses = heads_from_table(inner)
    completed: Completed | None = None
    if example_inputs is not None:
        completed = complete(inner, example_inputs, groups)
        misses = {name: reason for name, reason in misses.items() if name not in completed.modules} | completed.misses
        if completed.mixed:
            listed = [f"{report.name} ({report.note})" for report in completed.mixed]
            warn_user(f"these projections are not heads and are left out: {', '.join(listed[:6])}")
        if completed.untraced:
            warn_user(
                "these heads are not proved, because the example did not reach them: " + ", ".join(completed.untraced)
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
    """Slice the same projections so that feature c belongs to particle c mod M."""
    slices = []
    for s in group.slices:
        if s.feature_axis is not None:
            raise SelectionError(
                f"layout='strided' needs one axis for the features of all heads; {s.parameter_name} has separate axes "
                "for heads and features: use layout='heads', or exclude the layer with match=..."
            )
        features = s.rows.flatten().sort().values  # [M * R]
        rows = features.view(-1, s.num_heads).T.contiguous()  # [M, R]
        slices.append(HeadSlice(s.module, s.attribute, s.parameter_name, rows, s.axis))
    return replace(group, slices=tuple(slices), proof="guess" if group.proof == "guess" else "given")


def left_out(model: nn.Module, groups: Sequence[HeadGroup]) -> dict[str, str]:
    """Find modules that look like attention but have no known heads in them, their parents or their children.

    Args:
        model: any module.
        groups: heads found in the model. Heads in the family table count as known even if they were not selected.

    Returns:
        {module name: class name} for each such module.
    """
    inner = unwrap(model)
    known = [*heads_from_table(inner)[0], *groups]
    with_heads = {module_of(group) for group in known}
    weights = {id(parameter) for group in known for parameter in group.parameters()}  # other modules may share them
    missed: dict[str, str] = {}
    for name, module in inner.named_modules():
        own = clean(name)
        own_weights = {id(parameter) for parameter in module.parameters()}
        if _looks_like_attention(module) and own_weights and not own_weights & weights:
            is_related = any(
                not a or not b or f"{a}.".startswith(f"{b}.") for x in with_heads for a, b in ((own, x), (x, own))
            )
            if not is_related and not any(own.startswith(f"{other}.") for other in missed):
                missed[own] = type(module).__name__
    return missed


def _looks_like_attention(module: nn.Module) -> bool:
    return any(word in kind.lower() for kind in kinds_of(module) for word in ("attention", "attn", "mha"))


def _nothing_found(model: nn.Module, misses: Mapping[str, str], is_untraced: bool) -> str:
    known = len(known_families())
    for name, module in model.named_modules():
        if _looks_like_attention(module) and clean(name) not in misses:
            misses = {**misses, clean(name): f"{type(module).__name__} matches none of the {known} families"}
    listed = [f"  {name or '(the model itself)'}: {reason}" for name, reason in list(misses.items())[:12]]
    lines = [f"no attention heads found in {type(model).__name__}."]
    lines += ["Near misses:", *listed] if listed else ["No module looks like attention."]
    if is_untraced:
        lines.append(
            "To find heads of an unknown class by a trace, pass inputs of the model: example_inputs=..., or --example "
            "on the command line."
        )
    lines.append(
        'To name them by hand, pass groups=heads_by_hand(model, {"layers.0.attn.wq": ("q", 8), ...}) to repel.'
    )
    return "\n".join(lines)
