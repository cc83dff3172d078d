"""Inspect the heads of any model: similarity, importance, ablation, and the most similar pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.diagnostics.hooks.attention_layers import AttentionLayer, find_attention_layers
from repulsive.diagnostics.hooks.calling import evaluating, items_in
from repulsive.diagnostics.hooks.measure_batches import measure_batches
from repulsive.diagnostics.importance import first_order_importance
from repulsive.diagnostics.layer_names import short_names
from repulsive.diagnostics.output_change import OutputChange, label_free_loss
from repulsive.diagnostics.redundancy import Ablation, Curve, head_ablation, pruning_curve
from repulsive.diagnostics.similarity import Diversity, Pair, of_weights
from repulsive.diagnostics.untrained_baseline import TWINS, AgainstChance, against_chance
from repulsive.errors import HeadLayoutError, NoHeadsFound
from repulsive.heads import HeadGroup, find_heads
from repulsive.heads.module_paths import module_of


@dataclass(frozen=True, eq=False)
class Inspection:
    """Measurements of a model's heads.

    Args:
        groups: the groups of heads, one per part.
        layers: (name, layer, where, number of heads) of each attention layer.
        diversity: "weights", "attention" and "outputs" -> one entry per group or layer, if measured.
        importance: first-order importance of each head [L, M], l2-normalised per layer; None without inputs.
        ablation: change of `metric` when each head is ablated, if requested.
        metric: description of the measured change of the output.
        items: number of inputs.
        maps: for the first inputs, layer name -> attention of each head [M, T, S], without padding.
        notes: messages about measurements that failed, with the reasons.
        pruned: with `ablation`, the pruning curve of `metric` by first-order importance.
        circuits: similarity of attention logits and OV circuits, with untrained twins; empty without inputs.
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
        """Return the short name of a group or layer, such as "layer 3 q" or "encoder layer 3"."""
        return short_names(self.groups).get(name, name)

    def closest(self, space: str, count: int = 5) -> list[Pair]:
        """Return the most similar pairs of heads over all layers in one space: "weights", "attention" or "outputs"."""
        pairs = [pair for entry in self.diversity.get(space, ()) for pair in entry.closest(count)]
        return sorted(pairs, key=lambda pair: -pair.cosine)[:count]

    def least(self, scores: Tensor, count: int = 5) -> list[tuple[str, int, float]]:
        """Return (layer name, head, score) of the `count` heads with the lowest scores [L, M]."""
        heads = [
            (name, head, float(scores[row, head]))
            for row, (name, _, _, heads) in enumerate(self.layers)
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
        model: any module with heads that `find_heads` finds; it does not change.
        batches: inputs, each a tensor, a tuple of arguments or a mapping; without inputs only weights are measured.
        ablation: also ablate each head, which takes one pass over the batches per head.
        shown: number of inputs of the first batch whose attention maps are kept.
        twins: number of untrained twins to compare attention logits and OV circuits with.
        seed: random seed of importance (labels or signs), of token samples and of twins.
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
    layers, notes = _hookable_layers(model, groups)
    listed = [(layer.name, layer.layer, layer.where, layer.num_heads) for layer in layers]
    if not batches:
        return Inspection(groups, listed, diversity, notes=tuple(notes))
    circuits = _circuits(model, batches, groups, twins, seed)
    if not layers:
        return Inspection(groups, [], diversity, notes=(*notes, *circuits.notes), circuits=circuits)
    measured = measure_batches(model, batches, layers, shown=shown)
    notes = [*notes, *measured.notes, *circuits.notes]
    loss = label_free_loss(torch.Generator().manual_seed(seed))
    importance = first_order_importance(model, loss, batches, layers=layers)
    exact, metric, pruned = None, "", None
    if ablation:
        with evaluating(model):
            change = OutputChange(model, batches)
        exact, metric = head_ablation(model, change, layers=layers, progress=progress), change.metric
        pruned = pruning_curve(model, change, importance, layers=layers)
    return Inspection(
        groups,
        listed,
        diversity | measured.diversity,
        importance=importance,
        ablation=exact,
        metric=metric,
        items=sum(items_in(batch) for batch in batches),
        maps=measured.maps,
        notes=tuple(notes),
        pruned=pruned,
        circuits=circuits,
    )


def _circuits(
    model: nn.Module, batches: Sequence[Any], groups: Sequence[HeadGroup], twins: int, seed: int
) -> AgainstChance:
    try:
        return against_chance(model, batches, twins=twins, seed=seed, groups=groups)
    except HeadLayoutError as error:
        return AgainstChance(notes=(str(error),))


def _hookable_layers(model: nn.Module, groups: Sequence[HeadGroup]) -> tuple[list[AttentionLayer], list[str]]:
    """Find the layers whose head outputs can be hooked, and write a note for each layer where they cannot."""
    by_module: dict[str, list[HeadGroup]] = {}
    for group in groups:
        by_module.setdefault(module_of(group), []).append(group)
    layers, notes = [], []
    for own in by_module.values():
        try:
            layers += find_attention_layers(model, own)
        except HeadLayoutError as error:
            notes.append(f"outputs and importance are not measured: {error}")
    return layers, notes
