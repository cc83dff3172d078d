"""What a report measures on the trained weights of one run: how alike its heads are, and what each is worth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from repulsive.data.batches import Buckets
from repulsive.data.prepared import Part
from repulsive.diagnostics.diversity import Diversity, of_weights
from repulsive.diagnostics.outlets import find_outlets
from repulsive.diagnostics.redundancy import head_ablation
from repulsive.diagnostics.report.maps import head_overlap
from repulsive.diagnostics.reweighted import leave_one_out, reweighted_logits
from repulsive.diagnostics.uncertainty import bootstrap_weights, mixture
from repulsive.heads import find_heads
from repulsive.recipes.classification import model_inputs
from repulsive.training.task import Evaluation

DRAWS = 20  # resamples of the head bootstrap
_AT_ONCE = 256
_ROOM = 1 << 25  # numbers that leave the heads in one pass


@dataclass(frozen=True, eq=False)
class Measured:
    """One run on one part of the data; what was not measured is None.

    Args:
        weights: how alike the heads' weights are, for each group.
        overlap: attention that heads have in common, mean over items, [M, M].
        change: accuracy without each head minus accuracy with all, [M], of several layers one after the other.
        items: how many items that was measured on.
        bootstrap: probabilities of the head bootstrap on these items, [N, C].
        foreign: probabilities on another data set, [K, C]; None where there is none.
    """

    weights: list[Diversity]
    overlap: Tensor | None = None
    change: Tensor | None = None
    items: int = 0
    bootstrap: Tensor | None = None
    foreign: Tensor | None = None


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
    alike = of_weights(find_heads(model))
    if look is None:
        return Measured(alike)
    found = head_ablation(model, lambda it: look(it).items["correct"].double(), progress=tell)
    change = found.change[~found.change.isnan()]  # [heads of all layers]
    return Measured(alike, change=change, items=0 if found.items is None else found.items.shape[-1])


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
    outlets = find_outlets(model)
    heads = outlets[0].num_heads
    generator = torch.Generator().manual_seed(seed)
    weights = torch.cat([torch.ones(1, heads), leave_one_out(heads), bootstrap_weights(heads, DRAWS, generator)])
    sides = len(part.sentences)
    weights = weights.double() ** (1 / sides)  # a pair multiplies what the head makes of one sentence and of the other
    count = min(most, len(part))
    correct = torch.zeros(1 + heads, dtype=torch.float64)
    boot: Tensor | None = None
    overlap = torch.zeros(heads, heads, dtype=torch.float64)
    for indices, arguments in _batches(part, count, _size(model, len(weights), heads)):
        _, attention, _ = model(*arguments, collect=True)
        for seen in attention if isinstance(attention, tuple) else (attention,):  # [B, M, T]
            overlap += head_overlap(seen.double()).sum(0).cpu() / sides
        logits = reweighted_logits(model, tuple(arguments), weights, outlets=outlets)  # [1 + M + K, B, C]
        right = logits[: 1 + heads].argmax(-1) == part.labels[indices]  # [1 + M, B]
        correct += right.sum(-1).double().cpu()
        mixed = mixture(logits[1 + heads :]).cpu()  # [B, C]
        boot = mixed.new_zeros(count, mixed.shape[1]) if boot is None else boot
        boot[indices.cpu()] = mixed
    change = (correct[1:] - correct[0]) / count
    there = None if foreign is None else predictions(model, foreign)
    return Measured(of_weights(find_heads(model)), overlap / count, change, count, boot, there)


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
