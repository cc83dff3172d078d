"""All that can be said of the heads of a model that somebody brings: diversity, redundancy, and who is like whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.diagnostics.chance import TWINS, AgainstChance, against_chance
from repulsive.diagnostics.diversity import Diversity, Pair, of_weights
from repulsive.diagnostics.hooks.calling import evaluating, items_in
from repulsive.diagnostics.hooks.outlets import Outlet, find_outlets
from repulsive.diagnostics.hooks.running import run_heads
from repulsive.diagnostics.importance import first_order_importance
from repulsive.diagnostics.labels import short_names
from repulsive.diagnostics.own_output import OwnChange, own_loss
from repulsive.diagnostics.redundancy import Ablation, Curve, head_ablation, pruning_curve
from repulsive.errors import HeadLayoutError, NoHeadsFound
from repulsive.heads import HeadGroup, find_heads
from repulsive.heads.module_paths import module_of


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
        maps: for the first inputs, layer's name -> attention of each head [M, T, S], padding cut off.
        notes: what could not be measured, and why.
        pruned: with `ablation`, its metric as heads go, those of the least first-order importance first.
        circuits: similarity of attention logits and OV circuits, beside untrained twins; empty without inputs.
    """

    groups: list[HeadGroup]
    layers: list[tuple[str, int, str, int]]
    diversity: dict[str, list[Diversity]]
    importance: Tensor | None = None
    ablation: Ablation | None = None
    metric: str = ""
    items: int = 0
    maps: tuple[dict[str, Tensor], ...] = ()
    notes: tuple[str, ...] = ()
    pruned: Curve | None = None
    circuits: AgainstChance = field(default_factory=AgainstChance)

    def label(self, name: str) -> str:
        """A short name for a group or layer: "layer 3 q", with its place where there are several stacks."""
        return short_names(self.groups).get(name, name)

    def closest(self, space: str, count: int = 5) -> list[Pair]:
        """The most similar pairs of heads of all layers in one space."""
        pairs = [pair for found in self.diversity.get(space, ()) for pair in found.closest(count)]
        return sorted(pairs, key=lambda pair: -pair.cosine)[:count]

    def least(self, scores: Tensor, count: int = 5) -> list[tuple[str, int, float]]:
        """(layer's name, head, score) of the heads with the lowest scores [L, M]."""
        heads = [
            (name, head, float(scores[place, head]))
            for place, (name, _, _, heads) in enumerate(self.layers)
            for head in range(heads)
        ]
        return sorted(heads, key=lambda head: head[2])[:count]


def inspect_heads(
    model: nn.Module,
    batches: Sequence[Any] = (),
    *,
    ablation: bool = False,
    shown: int = 4,
    twins: int = TWINS,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Inspection:
    """Measure the heads of any model on any inputs, without labels.

    Args:
        model: any module with heads that `find_heads` finds; it stays as it is.
        batches: inputs, each a tensor, a tuple of arguments or a mapping; none: weights alone are measured.
        ablation: also take each head away, which costs a pass over the batches for each.
        shown: of how many inputs of the first batch to keep attention maps.
        twins: how many untrained twins to compare attention logits and OV circuits with; 0: none.
        seed: for the labels or signs that first-order importance draws, for tokens that are sampled and for twins.
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
    layers = [(o.name, o.layer, o.where, o.num_heads) for o in outlets]
    if not batches:
        return Inspection(groups, layers, diversity, notes=tuple(notes))
    circuits = _circuits(model, batches, groups, twins, seed)
    if not outlets:
        return Inspection(groups, [], diversity, notes=(*notes, *circuits.notes), circuits=circuits)
    seen = run_heads(model, batches, outlets, shown=shown)
    diversity, notes = diversity | seen.diversity, [*notes, *seen.notes, *circuits.notes]
    importance = first_order_importance(model, own_loss(torch.Generator().manual_seed(seed)), batches, outlets=outlets)
    exact, metric, pruned = None, "", None
    if ablation:
        with evaluating(model):
            own = OwnChange(model, batches)
        exact, metric = head_ablation(model, own, outlets=outlets, progress=progress), own.metric
        pruned = pruning_curve(model, own, importance, outlets=outlets)
    items = sum(items_in(batch) for batch in batches)
    return Inspection(
        groups, layers, diversity, importance, exact, metric, items, seen.maps, tuple(notes), pruned, circuits
    )


def _circuits(
    model: nn.Module, batches: Sequence[Any], groups: Sequence[HeadGroup], twins: int, seed: int
) -> AgainstChance:
    try:
        return against_chance(model, batches, twins=twins, seed=seed, groups=groups)
    except HeadLayoutError as error:
        return AgainstChance(notes=(str(error),))


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
