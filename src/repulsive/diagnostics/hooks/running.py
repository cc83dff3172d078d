"""Heads at work on some batches: how alike they are in what they look at and in what leaves them, and their maps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from repulsive.diagnostics.diversity import Diversity, merged
from repulsive.diagnostics.hooks.calling import items_in, real_queries
from repulsive.diagnostics.hooks.capture import Capture, Captured, capture
from repulsive.diagnostics.hooks.outlets import Outlet

Real = Callable[
    [Any, str], Tensor | None
]  # a batch, and "encoder", "decoder" or "cross" -> which queries count, [B, T]


@dataclass(frozen=True, eq=False)
class Running:
    """What was seen while a model ran.

    Args:
        diversity: "outputs" and "attention" -> one entry per layer that ran; a layer that hides its attention has none.
        maps: for the first items, layer's name -> attention [M, T, S] between tokens that are no padding.
        notes: layers that did not run, and layers that hide their attention.
    """

    diversity: dict[str, list[Diversity]]
    maps: tuple[dict[str, Tensor], ...]
    notes: tuple[str, ...]


def run_heads(
    model: nn.Module, batches: Iterable[Any], outlets: Sequence[Outlet], *, real: Real = real_queries, shown: int = 0
) -> Running:
    """Run a model on all batches; each weighs as much in the means as it has tokens that count.

    Args:
        model: its weights, flags and results stay as they are.
        batches: what the model takes, each a tensor, a tuple of arguments or a mapping.
        outlets: what `find_outlets` returned.
        real: which queries count.
        shown: of how many items of the first batch to keep maps.
    """
    parts: dict[str, dict[str, list[tuple[Diversity, float]]]] = {"attention": {}, "outputs": {}}
    maps: tuple[dict[str, Tensor], ...] = ()
    notes: dict[str, None] = {}
    for batch in batches:
        seen = capture(model, batch, outlets=outlets, strict=False)
        notes |= dict.fromkeys(f"{name}: the inputs did not reach this layer" for name in seen.idle)
        notes |= dict.fromkeys(f"attention is not measured: {told}" for told in seen.hidden)
        maps = maps or _maps(seen, batch, real, shown, notes)
        for layer in seen.layers:
            mask = real(batch, layer.outlet.where)
            weight = sum(_tokens(layer, mask, run) for run in range(len(layer.outputs)))
            for space in ("outputs", "attention") if layer.weights else ("outputs",):
                parts[space].setdefault(layer.outlet.name, []).append((layer.diversity(space, mask), weight))
    diversity = {space: [merged(each) for each in found.values()] for space, found in parts.items() if found}
    return Running(diversity, maps, tuple(notes))


def _tokens(layer: Captured, mask: Tensor | None, run: int) -> float:
    """How many of a run count, B T where nothing else is known."""
    own = layer.own(mask, run)
    batch, length = layer.outputs[run].shape[:2]
    return float(batch * length) if own is None else float(own.sum())


def _maps(seen: Capture, batch: Any, real: Real, shown: int, notes: dict[str, None]) -> tuple[dict[str, Tensor], ...]:
    """Of the first items; layers that attend within parts of items, such as windows of an image, are left out."""
    items, layers = items_in(batch), []
    for layer in seen.layers:
        parts = len(layer.weights[0]) if layer.weights else 0
        if parts > items and parts % items == 0:
            told = f"{layer.outlet.name}: attends within {parts} parts of {items} items; its maps are not shown"
            if shown:
                notes[told] = None
        elif parts:
            layers.append(layer)
    if not layers:
        return ()
    most = min([shown, *(len(layer.weights[0]) for layer in layers)])
    return tuple({layer.outlet.name: _map(layer, item, batch, real) for layer in layers} for item in range(most))


def _map(layer: Captured, item: int, batch: Any, real: Real) -> Tensor:
    """[M, T, S] of one item, padding cut off where it is known."""
    weights, where = layer.weights[0][item].float().cpu(), layer.outlet.where
    queries = layer.own(real(batch, where))
    keys = real(batch, "encoder") if where == "cross" else queries
    for axis, mask in ((1, queries), (2, keys)):
        if mask is not None and item < len(mask) and mask.shape[1] == weights.shape[axis]:
            weights = weights.index_select(axis, mask[item].nonzero()[:, 0].cpu())
    return weights
