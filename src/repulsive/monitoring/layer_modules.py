"""Modules that contain the attention layers of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from repulsive.diagnostics.hooks.attention_layers import AttentionLayer

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # never called themselves


def blocks_of_layers(
    modules: Mapping[str, nn.Module], layers: Sequence[AttentionLayer]
) -> list[tuple[AttentionLayer, nn.Module]]:
    """Find the block of each layer: its last ancestor that is an entry of a list of modules; each block once."""
    blocks: dict[str, AttentionLayer] = {}
    for layer in layers:
        name = layer.name
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            if isinstance(modules.get(".".join(parts[: end - 1])), (*_CONTAINERS, nn.Sequential)):
                name = ".".join(parts[:end])
                break
        blocks.setdefault(name, layer)
    return [(layer, modules[name]) for name, layer in blocks.items()]


def path_to_layers(modules: Mapping[str, nn.Module], names: Sequence[str]) -> list[nn.Module]:
    """List the modules from the root to the last one that contains all `names`; containers are left out."""
    split = [name.split(".") if name else [] for name in names]
    shared: list[str] = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    path = [modules[".".join(shared[:end])] for end in range(len(shared) + 1) if ".".join(shared[:end]) in modules]
    return [module for module in path if not isinstance(module, _CONTAINERS)]
