"""Walk a model against the family table."""

from __future__ import annotations

from torch import nn

from repulsive.errors import UnsupportedWeights
from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.heads.place import clean, number_layers, stack_of, where_of
from repulsive.heads.table.match import match


def known_heads(model: nn.Module) -> tuple[list[HeadGroup], dict[str, str]]:
    """What the family table says of an unwrapped model: groups, and near misses as {module name: reason}."""
    groups: list[HeadGroup] = []
    modules: list[str] = []
    misses: dict[str, str] = {}
    seen: set[tuple[object, ...]] = set()
    adapted: set[int] = set()  # what an adapter that was found itself stands for
    for name, module in model.named_modules():
        if id(module) in adapted:
            continue
        try:
            found, reason = match(module)
        except UnsupportedWeights as error:  # the module knows its own attributes only: say where it is
            raise UnsupportedWeights(dotted(clean(name), str(error))) from None
        if found is None:
            if reason:
                misses[clean(name)] = reason
            continue
        adapted.add(id(getattr(module, "base_layer", None)))
        place = where_of(model, name, found.family.where)
        for part in sorted(found.parts, key="qkv".index):
            slices = tuple(
                HeadSlice(w.module, w.attribute, dotted(clean(name), w.path), rows, w.axis)
                for w, rows in found.parts[part]
            )
            key = tuple((id(s.parameter()), tuple(s.rows.flatten().tolist())) for s in slices)
            if key in seen:  # tied to an earlier layer: the heads are found already
                continue
            seen.add(key)
            serves = found.serves if part == "q" else None
            title = dotted(clean(name), part)
            groups.append(
                HeadGroup(title, 0, part, place, stack_of(name), found.family.name, slices, serves, found.proof)
            )
            modules.append(clean(name))
    return number_layers(groups, modules), misses


def dotted(*names: str) -> str:
    """Join names with dots, leaving empty ones out."""
    return ".".join(name for name in names if name)
