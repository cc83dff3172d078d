"""Inspect the heads of any model: similarity, importance, ablation, and the most similar pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.diagnostics.head_kinds import HeadKinds, head_kinds
from repulsive.diagnostics.hooks.attention_layers import AttentionLayer, hookable_layers
from repulsive.diagnostics.hooks.calling import evaluating, items_in
from repulsive.diagnostics.hooks.measure_batches import measure_batches
from repulsive.diagnostics.hooks.measured_layers import find_measured_heads, guess_message, tied_message
from repulsive.diagnostics.hooks.traced_projections import traced_projections
from repulsive.diagnostics.importance import first_order_importance
from repulsive.diagnostics.layer_names import short_names
from repulsive.diagnostics.model_heads import Heads
from repulsive.diagnostics.output_ablation import ablate_output
from repulsive.diagnostics.output_change import OutputChange, label_free_loss
from repulsive.diagnostics.redundancy import Ablation, Curve, pruning_curve
from repulsive.diagnostics.similarity import Diversity, Pair, of_weights
from repulsive.diagnostics.untrained_baseline import SPACES, TWINS, AgainstChance, against_chance
from repulsive.errors import RepulsiveError, SelectionError
from repulsive.heads import HeadGroup

_TOKEN_INPUTS = {"input_ids", "attention_mask", "token_type_ids", "position_ids"}
_KINDS_LENGTH = 24  # tokens of each half of the generated inputs, if the model has enough positions


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
        circuits: similarity of attention logits, OV circuits, attention and outputs, with untrained twins and permuted
            heads; empty without inputs.
        kinds: well-known kinds of heads, rows in the order of `layers`; None if the model does not read token ids.
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
    kinds: HeadKinds | None = None

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
    separators: Sequence[int] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Inspection:
    """Measure the heads of any model on any inputs, without labels.

    Args:
        model: any module with heads that `find_heads` finds; it does not change.
        batches: inputs, each a tensor, a tuple of arguments or a mapping; without inputs only weights are measured.
        ablation: also ablate each head, which runs the batches once per head from its layer on.
        shown: number of inputs of the first batch whose attention maps are kept.
        twins: number of untrained twins to compare the similarity of heads with.
        seed: random seed of importance (labels or signs), of token samples and of twins.
        separators: token ids that separate sentences, to label heads that attend to them.
        progress: as in `ablate_output`.

    Raises:
        NoHeadsFound: the model has no heads.
    """
    groups = find_measured_heads(model, batches[0] if batches else None)
    diversity = {"weights": of_weights(groups)}
    out = traced_projections(model, groups, batches[0]) if batches else None
    layers, problems = hookable_layers(model, groups, out=out)
    notes = [f"outputs and importance are not measured: {problem}" for problem in problems]
    notes += [message] if (message := tied_message(model, groups)) else []
    listed = [(layer.name, layer.layer, layer.where, layer.num_heads) for layer in layers]
    if not batches:
        notes += [message] if (message := guess_message(groups)) else []
        return Inspection(groups, listed, diversity, notes=tuple(notes))
    circuits = against_chance(
        model, batches, spaces=SPACES, twins=twins, seed=seed, groups=groups, out=out, strict=False
    )
    if not layers:
        return Inspection(groups, [], diversity, notes=(*notes, *circuits.notes), circuits=circuits)
    measured = measure_batches(model, batches, layers, shown=shown)
    is_listed = all(group.proof == "table" for group in groups)
    kinds, kinds_notes = _kinds(model, batches[0], layers, is_listed, separators, twins, seed)
    notes = [*notes, *measured.notes, *circuits.notes, *kinds_notes]
    loss = label_free_loss(torch.Generator().manual_seed(seed), layers)
    importance = first_order_importance(model, loss, batches, layers=layers)
    exact, metric, pruned = None, "", None
    if ablation:
        result = ablate_output(model, batches, layers=layers, progress=progress)
        exact, metric = result.as_ablation(layers), result.metric
        with evaluating(model):
            change = OutputChange(model, batches, layers)
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
        kinds=kinds,
    )


def _kinds(
    model: nn.Module,
    batch: Any,
    layers: Sequence[AttentionLayer],
    is_listed: bool,
    separators: Sequence[int],
    twins: int,
    seed: int,
) -> tuple[HeadKinds | None, list[str]]:
    """Label the kinds of heads if the model reads token ids; otherwise a note says why not.

    Heads of classes that the family table does not list are proved on the batch.
    """
    keys = set(batch) if isinstance(batch, Mapping) else set()
    if "input_ids" not in keys or keys - _TOKEN_INPUTS:
        return None, ["kinds of heads are not labelled: the model does not read input_ids alone"]
    try:
        heads = Heads(model, None if is_listed else batch)
        result = head_kinds(heads, separators=separators, length=_kinds_length(model), twins=twins, seed=seed)
        rows = [[name for name, _ in heads.shape].index(layer.name) for layer in layers]
        return replace(result, scores={kind: values[rows] for kind, values in result.scores.items()}), []
    except SelectionError as error:
        return None, [f"kinds of heads are not labelled: {error}"]
    except (RepulsiveError, ValueError, TypeError, IndexError, RuntimeError) as error:  # raised by the model's own code
        return None, [f"kinds of heads are not labelled: {type(error).__name__} on generated token ids"]


def _kinds_length(model: nn.Module) -> int:
    """Tokens of each half of the generated inputs, which have different tokens and are read twice."""
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    limits = [(positions - 2) // 2] if isinstance(positions, int) else []  # RoBERTa counts positions from 2
    embedding: Any = getattr(model, "get_input_embeddings", lambda: None)()
    limits += [embedding.num_embeddings // 2] if isinstance(embedding, nn.Embedding) else []
    return min([_KINDS_LENGTH, *limits])
