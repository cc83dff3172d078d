"""Measurements that `repulsive report` asks of a task, for systems and reports to share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from repulsive.diagnostics.layer_names import short_names
from repulsive.diagnostics.redundancy import Curve, head_ablation
from repulsive.diagnostics.similarity import Diversity, of_weights
from repulsive.heads import find_heads
from repulsive.pages import Example, Layered

Progress = Callable[[int, int], None]  # number of heads ablated so far, and of all heads
BOOTSTRAP_DRAWS = 20  # resamples of the head bootstrap
EXAMPLES = 8  # items of each data split whose attention a report shows


@dataclass(frozen=True)
class ReportOptions:
    """Options of the measurements on one run.

    Args:
        part: data split: "test", "dev" or a further test set.
        most: maximum number of items, from the first on, to ablate heads on.
        seed: random seed of the head bootstrap.
        foreign: foreign data that `Task.open_foreign` returned; None: do not measure foreign data.
        bleu: measure ablations of translators by BLEU of greedy translations instead of token accuracy.
        progress: called after each head.
    """

    part: str = "test"
    most: int = 2000
    seed: int = 0
    foreign: Any = None
    bleu: bool = False
    progress: Progress | None = None


@dataclass(frozen=True, eq=False)
class Measured:
    """Head measurements of one run on one data split; None for quantities that were not measured.

    Args:
        weights: similarity of the heads' weights, for each group.
        overlap: attention that two heads share, mean over items, [M, M].
        change: `metric` without each head minus `metric` with all heads, [M]; layers follow one after the other.
        items: number of items on which `change` was measured.
        bootstrap: probabilities of the head bootstrap on these items, [N, C].
        foreign: probabilities on another dataset, [K, C].
        running: similarity of the heads' activations: "attention" and "outputs" -> one entry per layer.
        names: dotted name of a layer or group -> short name.
        by_layer: `change` by layer for models with several layers, [L, M]; NaN where a layer has fewer heads.
        layers: dotted names of these layers.
        metric: name of the metric that changes; its values are fractions.
        alone: `metric` with each head alone, for models with one layer, [M].
        pruned: `metric` as heads are removed, the least important first.
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


@dataclass(frozen=True, eq=False)
class Examples:
    """Attention of several models on the same items.

    Args:
        single: attention of models with one layer.
        layered: attention of models with several layers.
    """

    single: list[Example] = field(default_factory=list)
    layered: list[Layered] = field(default_factory=list)


def measure_weights(model: nn.Module) -> Measured:
    """Compare the weights of the heads, which needs no data."""
    groups = find_heads(model)
    return Measured(of_weights(groups), names=short_names(groups))


def measure_ablations(
    model: nn.Module, correct: Callable[[nn.Module], Tensor], progress: Progress | None = None
) -> Measured:
    """Compare the weights of the heads, and the accuracy without each head; each head costs one evaluation.

    Args:
        model: a model in evaluation mode.
        correct: function from a model to the correctness of each item, [N].
        progress: called after each head.
    """
    groups = find_heads(model)
    result = head_ablation(model, lambda ablated: correct(ablated).double(), progress=progress)
    return Measured(
        of_weights(groups),
        change=result.change[~result.change.isnan()],  # [heads of all layers]
        items=0 if result.items is None else result.items.shape[-1],
        names=short_names(groups),
        by_layer=result.change,
        layers=result.layers,
    )
