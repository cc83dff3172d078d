"""What a report measures on the trained weights of one run: how alike its heads are, and what each is worth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from repulsive.diagnostics.hooks.attention_layers import AttentionLayer, find_attention_layers
from repulsive.diagnostics.hooks.reweighted_heads import keep_one, leave_one_out, remove_in_order, reweighted_logits
from repulsive.diagnostics.layer_names import short_names
from repulsive.diagnostics.overlap import head_overlap
from repulsive.diagnostics.redundancy import Curve, head_ablation
from repulsive.diagnostics.similarity import Diversity, merged, of_outputs, of_weights
from repulsive.diagnostics.uncertainty import bootstrap_weights, mixture
from repulsive.heads import find_heads
from repulsive.lab.engine.task import Evaluation
from repulsive.lab.systems.classification.task import model_inputs
from repulsive.lab.text.batches import Buckets
from repulsive.lab.text.prepared import Part

DRAWS = 20  # resamples of the head bootstrap
_AT_ONCE = 256
_ROOM = 1 << 25  # numbers that leave the heads in one pass


@dataclass(frozen=True, eq=False)
class Measured:
    """One run on one part of the data; what was not measured is None.

    Args:
        weights: how alike the heads' weights are, for each group.
        overlap: attention that heads have in common, mean over items, [M, M].
        change: `metric` without each head minus that with all, [M], of several layers one after the other.
        items: how many items that was measured on.
        bootstrap: probabilities of the head bootstrap on these items, [N, C].
        foreign: probabilities on another data set, [K, C]; None where there is none.
        running: how alike heads are at work, "attention" and "outputs" -> one entry per layer.
        names: dotted names of layers and groups -> short ones.
        by_layer: `change` of models with layers, [L, M]; nan where a layer has fewer heads.
        layers: their dotted names.
        metric: what changes, as a share.
        alone: `metric` with each head alone, of models with one layer, [M].
        pruned: `metric` as heads go, those first that are least missed.
    """

    weights: list[Diversity]
    overlap: Tensor | None = None
    change: Tensor | None = None
    items: int = 0
    bootstrap: Tensor | None = None
    foreign: Tensor | None = None
    running: Mapping[str, Sequence[Diversity]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    by_layer: Tensor | None = None
    layers: Sequence[str] = ()
    metric: str = "accuracy"
    alone: Tensor | None = None
    pruned: Curve | None = None


def measure_model(
    model: nn.Module,
    look: Callable[[nn.Module], Evaluation] | None = None,
    tell: Callable[[int, int], None] | None = None,
) -> Measured:
    """What can be said of any model with heads; each costs a pass over what `look` looks at.

    Args:
        model: in evaluation mode.
        look: what the model does on the development set, `correct` for each item; None: weights alone are measured.
        tell: told how many heads were taken away, and of how many.
    """
    groups = find_heads(model)
    alike = of_weights(groups)
    if look is None:
        return Measured(alike, names=short_names(groups))
    found = head_ablation(model, lambda it: look(it).items["correct"].double(), progress=tell)
    change = found.change[~found.change.isnan()]  # [heads of all layers]
    items, names = 0 if found.items is None else found.items.shape[-1], short_names(groups)
    return Measured(alike, change=change, items=items, names=names, by_layer=found.change, layers=found.layers)


@torch.inference_mode()
def measure_classifier(
    model: nn.Module,
    part: Part,
    *,
    most: int,
    seed: int = 0,
    foreign: Part | None = None,
) -> Measured:
    """Heads of a self-attentive classifier on some items; each head is taken away once.

    Args:
        model: in evaluation mode.
        part: on its device.
        most: use the first so many items.
        seed: of the head bootstrap.
        foreign: sentences of another data set, on the same device.
    """
    layers = find_attention_layers(model)
    heads = layers[0].num_heads
    generator = torch.Generator().manual_seed(seed)
    fixed = torch.cat([torch.ones(1, heads), leave_one_out(heads), keep_one(heads)])  # [1 + 2 M, M]
    weights = torch.cat([fixed, bootstrap_weights(heads, DRAWS, generator)])
    sides = len(part.sentences)
    weights = weights.double() ** (1 / sides)  # a pair multiplies what the head makes of one sentence and of the other
    count = min(most, len(part))
    correct = torch.zeros(len(fixed), dtype=torch.float64)
    boot: Tensor | None = None
    overlap = torch.zeros(heads, heads, dtype=torch.float64)
    outputs: list[tuple[Diversity, float]] = []
    for indices, arguments in _batches(part, count, _size(model, len(weights), heads)):
        _, attention, sentences = model(*arguments, collect=True)
        for seen in attention if isinstance(attention, tuple) else (attention,):  # [B, M, T]
            overlap += head_overlap(seen.double()).sum(0).cpu() / sides
        for left in sentences if isinstance(sentences, tuple) else (sentences,):  # [B, M, d]
            outputs.append((of_outputs(left.unsqueeze(2), name=layers[0].name), len(left)))
        logits = reweighted_logits(model, tuple(arguments), weights, layers=layers)  # [1 + 2 M + K, B, C]
        right = logits[: len(fixed)].argmax(-1) == part.labels[indices]  # [1 + 2 M, B]
        correct += right.sum(-1).double().cpu()
        mixed = mixture(logits[len(fixed) :]).cpu()  # [B, C]
        boot = mixed.new_zeros(count, mixed.shape[1]) if boot is None else boot
        boot[indices.cpu()] = mixed
    change, alone = ((correct[1:] - correct[0]) / count).split(heads)
    there = None if foreign is None else predictions(model, foreign)
    running = {"outputs": [merged(outputs)]}
    found = Measured(of_weights(find_heads(model)), overlap / count, change, count, boot, there, running)
    order = change.argsort(descending=True, stable=True).tolist()
    return replace(found, alone=correct[0] / count + alone, pruned=_pruned(model, part, count, order, layers))


def _pruned(model: nn.Module, part: Part, count: int, order: list[int], layers: Sequence[AttentionLayer]) -> Curve:
    """Accuracy without the first heads of an order, all of it in one pass."""
    weights, correct = remove_in_order(order), torch.zeros(len(order) + 1, dtype=torch.float64)
    for indices, arguments in _batches(part, count, _size(model, len(weights), len(order))):
        logits = reweighted_logits(model, tuple(arguments), weights, layers=layers)  # [1 + M, B, C]
        correct += (logits.argmax(-1) == part.labels[indices]).sum(-1).double().cpu()
    shares = (correct / count).tolist()
    return Curve(tuple(range(len(shares))), tuple(shares), tuple((0, head) for head in order))


@torch.inference_mode()
def predictions(model: nn.Module, part: Part) -> Tensor:
    """Probabilities of a classifier on all items of a part, float64 [N, C]."""
    found: Tensor | None = None
    for indices, arguments in _batches(part, len(part), _AT_ONCE):
        p = model(*arguments).double().softmax(-1).cpu()  # [B, C]
        found = p.new_zeros(len(part), p.shape[1]) if found is None else found
        found[indices.cpu()] = p
    assert found is not None  # a part without items cannot be prepared
    return found


def _batches(part: Part, count: int, size: int) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Indices and what the model takes, from short sentences to long."""
    for batch in Buckets(part.lengths[:count].cpu(), size).in_order():
        indices = batch.indices.to(part.labels.device)
        yield indices, model_inputs(part, indices, batch.length)


def _size(model: nn.Module, copies: int, heads: int) -> int:
    """Items at once, so that all copies of what leaves the heads find room."""
    wide = max((module.hidden_size for module in model.modules() if isinstance(module, nn.LSTM)), default=512)
    return max(1, min(_AT_ONCE, _ROOM // (copies * heads * 2 * wide)))
