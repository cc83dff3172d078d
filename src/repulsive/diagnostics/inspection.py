"""All that can be said of the heads of a model that somebody brings: diversity, redundancy, and who is like whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.diagnostics.calling import evaluating, items_in
from repulsive.diagnostics.capture import Capture, capture
from repulsive.diagnostics.diversity import Diversity, Pair, of_weights
from repulsive.diagnostics.importance import first_order_importance
from repulsive.diagnostics.outlets import Outlet, find_outlets
from repulsive.diagnostics.own_output import OwnChange, own_loss, real_tokens
from repulsive.diagnostics.redundancy import Ablation, head_ablation
from repulsive.errors import HeadLayoutError, NoHeadsFound
from repulsive.heads import HeadGroup, find_heads
from repulsive.heads.place import module_of


@dataclass(frozen=True, eq=False)
class Inspection:
    """What was found.

    Args:
        groups: the heads, part by part.
        layers: attention layers, (name, layer, where, heads) each.
        diversity: "weights", "attention" and "outputs" -> one entry per group or layer; only what was measured.
        importance: first-order importance of each head [L, M], l2-normalised per layer; None without inputs.
        ablation: exact, where it was asked for; its change is that of `metric`.
        metric: what the change of the output is, in words.
        items: how many inputs were read.
        looked: for the first inputs, layer's name -> how much each head looked at each token, averaged over queries,
            [M, T].
        notes: what could not be measured, and why.
    """

    groups: list[HeadGroup]
    layers: list[tuple[str, int, str, int]]
    diversity: dict[str, list[Diversity]]
    importance: Tensor | None = None
    ablation: Ablation | None = None
    metric: str = ""
    items: int = 0
    looked: tuple[dict[str, Tensor], ...] = ()
    notes: tuple[str, ...] = ()

    def label(self, name: str) -> str:
        """A short name for a group or layer: "layer 3 q", with its place where there are several stacks."""
        places = {(group.where, group.stack) for group in self.groups}
        for group in self.groups:
            where = f"{group.where} " if len(places) > 1 else ""
            if name == group.name:
                return f"{where}layer {group.layer} {group.part}"
            if name == module_of(group):
                return f"{where}layer {group.layer}"
        return name

    def closest(self, space: str, count: int = 5) -> list[Pair]:
        """The most similar pairs of heads of all layers in one space."""
        pairs = [pair for found in self.diversity.get(space, ()) for pair in found.closest(count)]
        return sorted(pairs, key=lambda pair: -pair.cosine)[:count]

    def least(self, scores: Tensor, count: int = 5) -> list[tuple[str, int, float]]:
        """(layer's name, head, score) of the heads with the lowest scores [L, M]."""
        heads = [(name, head, float(scores[place, head]))
                 for place, (name, _, _, heads) in enumerate(self.layers) for head in range(heads)]  # fmt: skip
        return sorted(heads, key=lambda head: head[2])[:count]


def inspect_heads(
    model: nn.Module,
    batches: Sequence[Any] = (),
    *,
    ablation: bool = False,
    shown: int = 3,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Inspection:
    """Measure the heads of any model on any inputs, without labels.

    Args:
        model: any module with heads that `find_heads` finds; it stays as it is.
        batches: inputs, each a tensor, a tuple of arguments or a mapping; none: weights alone are measured.
        ablation: also take each head away, which costs a pass over the batches for each.
        shown: of how many inputs of the first batch to keep what heads look at.
        seed: for the labels or signs that first-order importance draws.
        progress: as in `head_ablation`.

    Raises:
        NoHeadsFound: the model has no heads.
    """
    try:
        groups = find_heads(model)
    except NoHeadsFound:
        if not batches:
            raise
        groups = find_heads(model, batches[0])
    diversity = {"weights": of_weights(groups)}
    outlets, notes = _outlets(model, groups)
    if not outlets:
        return Inspection(groups, [], diversity, notes=tuple(notes))
    layers = [(o.name, o.layer, o.where, o.num_heads) for o in outlets]
    if not batches:
        return Inspection(groups, layers, diversity, notes=tuple(notes))
    found, looked, more = _running(model, batches, outlets, shown)
    diversity, notes = diversity | found, [*notes, *more]
    importance = first_order_importance(model, own_loss(torch.Generator().manual_seed(seed)), batches, outlets=outlets)
    exact, metric = None, ""
    if ablation:
        with evaluating(model):
            own = OwnChange(model, batches)
        exact, metric = head_ablation(model, own, outlets=outlets, progress=progress), own.metric
    items = sum(items_in(batch) for batch in batches)
    return Inspection(groups, layers, diversity, importance, exact, metric, items, looked, tuple(notes))


def _outlets(model: nn.Module, groups: Sequence[HeadGroup]) -> tuple[list[Outlet], list[str]]:
    """Where heads leave, and a note for each layer where that is not known."""
    layers: dict[str, list[HeadGroup]] = {}
    for group in groups:
        layers.setdefault(module_of(group), []).append(group)
    outlets, notes = [], []
    for each in layers.values():
        try:
            outlets += find_outlets(model, each)
        except HeadLayoutError as error:
            notes.append(f"outputs and importance are not measured: {error}")
    return outlets, notes


def _running(
    model: nn.Module, batches: Sequence[Any], outlets: Sequence[Outlet], shown: int
) -> tuple[dict[str, list[Diversity]], tuple[dict[str, Tensor], ...], list[str]]:
    """Diversity of outputs and attention over all batches, each weighing as many as it has real tokens."""
    notes: list[str] = []
    spaces = ["outputs", "attention"]
    parts: dict[str, dict[str, list[tuple[Diversity, float]]]] = {space: {} for space in spaces}
    looked: tuple[dict[str, Tensor], ...] = ()
    for batch in batches:
        try:
            seen = capture(model, batch, weights="attention" in spaces, outlets=outlets)
        except HeadLayoutError as error:
            if "attn_implementation" not in str(error):
                raise
            notes.append(f"attention is not measured: {error}")
            spaces.remove("attention")
            seen = capture(model, batch, weights=False, outlets=outlets)
        looked = looked or _looked(seen, real_tokens(batch), shown)
        if seen.idle:
            notes += [f"{name}: the inputs did not reach this layer" for name in seen.idle]
        for layer in seen.layers:
            real = real_tokens(batch)
            weight = float(real.sum()) if real is not None else float(items_in(batch))
            for space in spaces:
                parts[space].setdefault(layer.outlet.name, []).append((layer.diversity(space, real), weight))
    merged = {space: [_merged(each) for each in parts[space].values()] for space in spaces}
    return merged, looked, list(dict.fromkeys(notes))


def _merged(parts: Sequence[tuple[Diversity, float]]) -> Diversity:
    total = sum(weight for _, weight in parts)
    first = parts[0][0]
    distance = sum(found.distance * (weight / total) for found, weight in parts)
    cosine = sum(found.cosine * (weight / total) for found, weight in parts)
    assert isinstance(distance, Tensor) and isinstance(cosine, Tensor)
    return Diversity(first.name, first.space, distance, cosine)


def _looked(seen: Capture, real: Tensor | None, shown: int) -> tuple[dict[str, Tensor], ...]:
    """For each of the first items, per layer, the mean over real queries of the weights on real tokens, [M, T]."""
    found = []
    for item in range(shown):
        layers = {}
        for layer in seen.layers:
            if not layer.weights or item >= len(layer.weights[0]):
                continue
            weights = layer.weights[0][item].float()  # [M, T, S]
            if real is not None and weights.shape[1:] == (real.shape[1],) * 2:
                weights = weights[:, real[item]][:, :, real[item]]
            layers[layer.outlet.name] = weights.mean(1).cpu()  # [M, S]
        if layers and len({looked.shape[1] for looked in layers.values()}) == 1:
            found.append(layers)
    return tuple(found)
