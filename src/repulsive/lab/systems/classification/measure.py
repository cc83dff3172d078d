"""Measurements on the heads of a trained classifier: similarity, ablation, bootstrap and predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from repulsive.diagnostics.hooks.attention_layers import AttentionLayer, find_attention_layers
from repulsive.diagnostics.hooks.reweighted_heads import keep_one, leave_one_out, remove_in_order, reweighted_logits
from repulsive.diagnostics.overlap import head_overlap
from repulsive.diagnostics.redundancy import Curve
from repulsive.diagnostics.similarity import Diversity, merged, of_outputs, of_weights
from repulsive.diagnostics.uncertainty import bootstrap_weights, mixture
from repulsive.heads import find_heads
from repulsive.lab.engine.reporting import BOOTSTRAP_DRAWS, Measured
from repulsive.lab.systems.classification.inputs import model_inputs
from repulsive.lab.text.batches import Buckets
from repulsive.lab.text.prepared import Part

_BATCH = 256
_MEMORY = 1 << 25  # maximum count of head-output values held in one pass


@torch.inference_mode()
def measure_classifier(
    model: nn.Module,
    part: Part,
    *,
    most: int,
    seed: int = 0,
    foreign: Part | None = None,
) -> Measured:
    """Measure the heads of a self-attentive classifier, with each head ablated once.

    Args:
        model: a classifier in evaluation mode.
        part: the data split, on the model's device.
        most: maximum number of items to measure, from the first on.
        seed: random seed of the head bootstrap.
        foreign: sentences of another dataset, on the same device.
    """
    layers = find_attention_layers(model)
    heads = layers[0].num_heads
    generator = torch.Generator().manual_seed(seed)
    fixed = torch.cat([torch.ones(1, heads), leave_one_out(heads), keep_one(heads)])  # [1 + 2 M, M]
    weights = torch.cat([fixed, bootstrap_weights(heads, BOOTSTRAP_DRAWS, generator)])
    sides = len(part.sentences)
    weights = weights.double() ** (1 / sides)  # the pair model multiplies a head's outputs for the two sentences
    count = min(most, len(part))
    correct = torch.zeros(len(fixed), dtype=torch.float64)
    boot: Tensor | None = None
    overlap = torch.zeros(heads, heads, dtype=torch.float64)
    outputs: list[tuple[Diversity, float]] = []
    for indices, arguments in _batches(part, count, _batch_size(model, len(weights), heads)):
        _, attention, sentences = model(*arguments, collect=True)
        for view in attention if isinstance(attention, tuple) else (attention,):  # [B, M, T]
            overlap += head_overlap(view.double()).sum(0).cpu() / sides
        for output in sentences if isinstance(sentences, tuple) else (sentences,):  # [B, M, d]
            outputs.append((of_outputs(output.unsqueeze(2), name=layers[0].name), len(output)))
        logits = reweighted_logits(model, tuple(arguments), weights, layers=layers)  # [1 + 2 M + K, B, C]
        right = logits[: len(fixed)].argmax(-1) == part.labels[indices]  # [1 + 2 M, B]
        correct += right.sum(-1).double().cpu()
        mixed = mixture(logits[len(fixed) :]).cpu()  # [B, C]
        boot = mixed.new_zeros(count, mixed.shape[1]) if boot is None else boot
        boot[indices.cpu()] = mixed
    change, alone = ((correct[1:] - correct[0]) / count).split(heads)
    on_foreign = None if foreign is None else predictions(model, foreign)
    running = {"outputs": [merged(outputs)]}
    measured = Measured(of_weights(find_heads(model)), overlap / count, change, count, boot, on_foreign, running)
    order = change.argsort(descending=True, stable=True).tolist()
    return replace(measured, alone=correct[0] / count + alone, pruned=_pruned(model, part, count, order, layers))


def _pruned(model: nn.Module, part: Part, count: int, order: list[int], layers: Sequence[AttentionLayer]) -> Curve:
    """Measure the accuracy as heads are removed in the given order, in one pass over the data."""
    weights, correct = remove_in_order(order), torch.zeros(len(order) + 1, dtype=torch.float64)
    for indices, arguments in _batches(part, count, _batch_size(model, len(weights), len(order))):
        logits = reweighted_logits(model, tuple(arguments), weights, layers=layers)  # [1 + M, B, C]
        correct += (logits.argmax(-1) == part.labels[indices]).sum(-1).double().cpu()
    shares = (correct / count).tolist()
    return Curve(tuple(range(len(shares))), tuple(shares), tuple((0, head) for head in order))


@torch.inference_mode()
def predictions(model: nn.Module, part: Part) -> Tensor:
    """Compute the class probabilities of all items of a data split, float64 [N, C]."""
    result: Tensor | None = None
    for indices, arguments in _batches(part, len(part), _BATCH):
        p = model(*arguments).double().softmax(-1).cpu()  # [B, C]
        result = p.new_zeros(len(part), p.shape[1]) if result is None else result
        result[indices.cpu()] = p
    assert result is not None  # prepared data splits are never empty
    return result


def _batches(part: Part, count: int, size: int) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield indices and model inputs of the first `count` items, from short sentences to long."""
    for batch in Buckets(part.lengths[:count].cpu(), size).in_order():
        indices = batch.indices.to(part.labels.device)
        yield indices, model_inputs(part, indices, batch.length)


def _batch_size(model: nn.Module, copies: int, heads: int) -> int:
    """Compute the number of items for which `copies` copies of the head outputs fit in memory."""
    width = max((module.hidden_size for module in model.modules() if isinstance(module, nn.LSTM)), default=512)
    return max(1, min(_BATCH, _MEMORY // (copies * heads * 2 * width)))
