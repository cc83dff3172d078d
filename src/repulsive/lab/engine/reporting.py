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
EXAMPLES = 8  # items of each part whose attention a report shows


@dataclass(frozen=True)
class ReportOptions:
    """What to measure on one run.

    Args:
        part: "test", "dev" or a further test set.
        most: number of items, from the first on, to ablate heads on.
        seed: of the head bootstrap.
        foreign: what `Task.open_foreign` returned; None: nothing.
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
    """Measurements of the heads of one run on one part of the data; None where nothing was measured.

    Args:
        weights: similarity of the heads' weights, for each group.
        overlap: attention that two heads share, mean over items, [M, M].
        change: `metric` without each head minus `metric` with all, [M]; of several layers one after the other.
        items: number of items of `change`.
        bootstrap: probabilities of the head bootstrap on these items, [N, C].
        foreign: probabilities on another dataset, [K, C].
        running: similarity of the heads' activations: "attention" and "outputs" -> one entry per layer.
        names: dotted name of a layer or group -> short name.
        by_layer: `change` of models with several layers, [L, M]; nan where a layer has fewer heads.
        layers: dotted names of these layers.
        metric: name of the metric that changes; its values are fractions.
        alone: `metric` with each head alone, of models with one layer, [M].
        pruned: `metric` as heads are removed, in the order of the least loss.
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
        single: of models with one layer.
        layered: of models with several layers.
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
        model: in evaluation mode.
        correct: model -> correctness of each item, [N].
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
