"""Short names for layers: "encoder layer 3" says more than a dotted path, where it says enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from repulsive.heads import HeadGroup
from repulsive.heads.module_paths import module_of


def short_names(groups: Sequence[HeadGroup]) -> dict[str, str]:
    """Dotted name of each attention layer, and of each group -> "layer 3" and "layer 3 q", with its place.

    The place ("encoder") is there where a model has several stacks. Layers that would be called the same keep their
    dotted names.

    Args:
        groups: what `find_heads` returned.
    """
    several = len({(group.where, group.stack) for group in groups}) > 1
    layers = {module_of(g): f"{g.where} layer {g.layer}" if several else f"layer {g.layer}" for g in groups}
    alike = Counter(layers.values())
    layers = {name: short if alike[short] == 1 else name for name, short in layers.items()}
    return layers | {g.name: f"{layers[module_of(g)]} {g.part}".strip() for g in groups}
