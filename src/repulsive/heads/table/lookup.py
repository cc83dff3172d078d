"""Look up the heads of a model in the family table."""

from __future__ import annotations

from torch import nn

from repulsive.errors import UnsupportedWeights
from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.heads.module_paths import clean, dotted, module_of, number_layers, stack_of, where_of
from repulsive.heads.table.match import match


def heads_from_table(model: nn.Module) -> tuple[list[HeadGroup], dict[str, str]]:
    """Match every module of an unwrapped model against the family table.

    Returns:
        The groups, and near misses as {module name: reason}.
    """
    groups: list[HeadGroup] = []
    modules: list[str] = []
    misses: dict[str, str] = {}
    claimed: set[tuple[object, ...]] = set()
    adapted: set[int] = set()  # modules inside an adapter that has matched already
    for name, module in model.named_modules():
        if id(module) in adapted:
            continue
        try:
            matched, reason = match(module)
        except UnsupportedWeights as error:  # `match` does not know where the module is: add its name
            raise UnsupportedWeights(dotted(clean(name), str(error))) from None
        if matched is None:
            if reason:
                misses[clean(name)] = reason
            continue
        adapted.add(id(getattr(module, "base_layer", None)))
        where = where_of(model, name, matched.family.where)
        for part in sorted(matched.parts, key="qkv".index):
            slices = tuple(
                HeadSlice(w.module, w.attribute, dotted(clean(name), w.path), rows, w.axis)
                for w, rows in matched.parts[part]
            )
            key = tuple((id(s.parameter()), tuple(s.rows.flatten().tolist())) for s in slices)
            if key in claimed:  # weights tied to an earlier layer
                continue
            claimed.add(key)
            serves = matched.serves if part == "q" else None
            title = dotted(clean(name), part)
            groups.append(
                HeadGroup(title, 0, part, where, stack_of(name), matched.family.name, slices, serves, matched.proof)
            )
            modules.append(clean(name))
    return number_layers(groups, modules), misses


def listed_modules(model: nn.Module) -> set[str]:
    """Return the dotted names of the attention modules whose class the family table lists, of an unwrapped model."""
    return {module_of(group) for group in heads_from_table(model)[0] if group.proof == "table"}
