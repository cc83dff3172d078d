"""Run a model on batches, and measure the similarity of its heads in attention and outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from repulsive.diagnostics.hooks.attention_layers import AttentionLayer
from repulsive.diagnostics.hooks.calling import TokenMask, items_in, token_masks
from repulsive.diagnostics.hooks.capture import Capture, Captured, capture
from repulsive.diagnostics.similarity import Diversity, merged


@dataclass(frozen=True, eq=False)
class BatchMeasurements:
    """Similarity of heads, averaged over batches, and attention maps of the first items.

    Args:
        diversity: "outputs" and "attention" -> one entry per layer that ran; layers whose attention weights could not
            be captured have no "attention" entry.
        maps: for the first items, layer name -> attention [M, T, S] between tokens that are not padding.
        notes: layers that did not run, and layers whose attention could not be captured.
    """

    diversity: dict[str, list[Diversity]]
    maps: tuple[dict[str, Tensor], ...]
    notes: tuple[str, ...]


def measure_batches(
    model: nn.Module,
    batches: Iterable[Any],
    layers: Sequence[AttentionLayer],
    *,
    real: TokenMask | None = None,
    shown: int = 0,
) -> BatchMeasurements:
    """Run a model on all batches and average over them, weighted by the number of tokens that count.

    Args:
        model: any module with heads; its weights, flags and results do not change.
        batches: inputs of the model, each a tensor, a tuple of arguments or a mapping.
        layers: the result of `find_attention_layers`.
        real: function that returns which queries of a batch count, or None for all; by default padding is left out.
        shown: number of items of the first batch whose attention maps are kept.
    """
    own_masks = real is None
    real = real or token_masks(model)[0]
    parts: dict[str, dict[str, list[tuple[Diversity, float]]]] = {"attention": {}, "outputs": {}}
    maps: tuple[dict[str, Tensor], ...] = ()
    notes: dict[str, None] = {}
    for batch in batches:
        captured = capture(model, batch, layers=layers, strict=False)
        if not own_masks:
            captured = replace(captured, layers=[replace(each, masks=()) for each in captured.layers])
        notes |= dict.fromkeys(f"{name}: this layer did not run on the inputs" for name in captured.idle)
        notes |= dict.fromkeys(f"attention is not measured: {problem}" for problem in captured.hidden)
        maps = maps or _maps(captured, batch, real, shown, notes)
        for each in captured.layers:
            mask = real(batch, each.layer.where)
            weight = sum(_tokens(each, mask, run) for run in range(len(each.outputs)))
            for space in ("outputs", "attention") if each.weights else ("outputs",):
                parts[space].setdefault(each.name, []).append((each.diversity(space, mask), weight))
    diversity = {
        space: [merged(values) for values in by_layer.values()] for space, by_layer in parts.items() if by_layer
    }
    return BatchMeasurements(diversity, maps, tuple(notes))


def _tokens(captured: Captured, mask: Tensor | None, run: int) -> float:
    """Count the tokens of a run that are not masked; B T without a mask."""
    own = captured.own_mask(mask, run)
    batch, length = captured.outputs[run].shape[:2]
    return float(batch * length) if own is None else float(own.sum())


def _maps(
    captured: Capture, batch: Any, real: TokenMask, shown: int, notes: dict[str, None]
) -> tuple[dict[str, Tensor], ...]:
    """Collect attention maps of the first items; skip layers that attend within windows of an item (Swin)."""
    items, layers = items_in(batch), []
    for each in captured.layers:
        parts = len(each.weights[0]) if each.weights else 0
        if parts > items and parts % items == 0:
            if shown:
                notes[f"{each.name}: attends within {parts} parts of {items} items; its maps are not shown"] = None
        elif parts:
            layers.append(each)
    if not layers:
        return ()
    count = min([shown, *(len(each.weights[0]) for each in layers)])
    return tuple({each.name: _map(each, item, batch, real) for each in layers} for item in range(count))


def _map(captured: Captured, item: int, batch: Any, real: TokenMask) -> Tensor:
    """Return the attention map [M, T, S] of one item, without padding if the mask is known."""
    weights, where = captured.weights[0][item].float().cpu(), captured.layer.where
    queries = captured.own_mask(real(batch, where))
    keys = real(batch, "encoder") if where == "cross" else queries
    for axis, mask in ((1, queries), (2, keys)):
        if mask is not None and item < len(mask) and mask.shape[1] == weights.shape[axis]:
            weights = weights.index_select(axis, mask[item].nonzero()[:, 0].cpu())
    return weights
