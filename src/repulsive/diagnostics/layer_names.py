"""Short names for attention layers, such as "encoder layer 3"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from repulsive.heads import HeadGroup
from repulsive.heads.module_paths import module_of


def short_names(groups: Sequence[HeadGroup]) -> dict[str, str]:
    """Map the dotted names of attention layers and groups to short names: "layer 3", "layer 3 q".

    Models with several stacks get a prefix: "encoder layer 3". Layers that would share a short name keep their
    dotted names.

    Args:
        groups: the result of `find_heads`.
    """
    several = len({(group.where, group.stack) for group in groups}) > 1
    layers = {module_of(g): f"{g.where} layer {g.layer}" if several else f"layer {g.layer}" for g in groups}
    counts = Counter(layers.values())
    layers = {name: short if counts[short] == 1 else name for name, short in layers.items()}
    return layers | {g.name: f"{layers[module_of(g)]} {g.part}".strip() for g in groups}
