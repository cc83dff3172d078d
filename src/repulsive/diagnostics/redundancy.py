r"""Ablation and pruning curves: measure a metric without some of the heads (Michel et al., 2019).

Attention is $\sum_h \xi_h W^O_h o_h$ with every $\xi_h = 1$. A head is ablated by $\xi_h = 0$ at test time, without
retraining and without rescaling the others. Heads are query heads; layers are numbered as `find_attention_layers`
lists them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.diagnostics.hooks.attention_layers import AttentionLayer, find_attention_layers, replaced_head_outputs
from repulsive.diagnostics.hooks.calling import evaluating, with_hooks
from repulsive.diagnostics.hooks.capture import check_hooks_ran
from repulsive.errors import SelectionError, warn_user

Head = tuple[int, int]  # layer, head
Evaluate = Callable[[nn.Module], float | Tensor]  # returns a number, or one per item [N]


@dataclass(frozen=True, eq=False)
class Ablation:
    """Change of a metric when heads are ablated.

    Args:
        layers: names of the attention layers.
        baseline: metric of the complete model.
        change: metric minus baseline [L, M], float64; nan for missing heads of layers with fewer heads.
        items: change of each item's metric [L, M, N], if the metric has one value per item.
    """

    layers: tuple[str, ...]
    baseline: float
    change: Tensor
    items: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Curve:
    """Pruning curve: `metric[k]` is the metric after the first `removed[k]` heads of `order` are removed."""

    removed: tuple[int, ...]
    metric: tuple[float, ...]
    order: tuple[Head, ...]


@contextmanager
def ablate(
    model: nn.Module, heads: Iterable[tuple[int | str, int]], *, layers: Sequence[AttentionLayer] | None = None
) -> Iterator[None]:
    """Set the outputs of the given heads to zero, at the input of the output projection, inside this context.

    Args:
        model: any module with heads that `find_heads` finds.
        heads: (layer, head) pairs; a layer is its index in `find_attention_layers(model)` or its name.
        layers: the result of `find_attention_layers`; None calls it.

    Raises:
        SelectionError: there is no such layer or head.

    Example:
        >>> model = nn.MultiheadAttention(8, 2, batch_first=True)
        >>> with ablate(model, [(0, 0), (0, 1)]):
        ...     out, _ = model(*[torch.ones(1, 3, 8)] * 3)
        >>> torch.equal(out, model.out_proj.bias.expand(1, 3, 8))
        True
    """
    layers = find_attention_layers(model) if layers is None else layers
    masks = head_masks(layers, heads)
    ran: set[str] = set()

    def zero(layer: AttentionLayer, outputs: Tensor) -> Tensor:
        ran.add(layer.name)
        return outputs.masked_fill(masks[layer.name].to(outputs.device).unsqueeze(-1), 0)  # [B, T, M, d]

    hooked = [layer for layer in layers if layer.name in masks]
    with with_hooks(model), replaced_head_outputs(hooked, zero):
        yield
    if masks and not ran:
        warn_user(
            f"ablate: the model did not run {', '.join(masks)}, so no head was ablated; if a compiled copy of it ran, "
            "pass that one instead"
        )


def head_ablation(
    model: nn.Module,
    evaluate: Evaluate,
    *,
    layers: Sequence[AttentionLayer] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Ablation:
    """Measure the change of a metric when each head is ablated in turn; H heads need H + 1 evaluations.

    Args:
        model: any module with heads that `find_heads` finds; it runs in evaluation mode, without gradients.
        evaluate: called with the model; returns a number, or a tensor with one number per item.
        layers: the result of `find_attention_layers`; None calls it.
        progress: called after each evaluation with the number done and the total.
    """
    return _ablate_each(model, evaluate, layers, progress, lambda _, row, head: [(row, head)])


def all_but_one(
    model: nn.Module,
    evaluate: Evaluate,
    *,
    layers: Sequence[AttentionLayer] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Ablation:
    """Keep each head in turn as the only head of its layer; other layers stay complete. See `head_ablation`."""

    def others(layer: AttentionLayer, row: int, head: int) -> list[Head]:
        return [(row, other) for other in range(layer.num_heads) if other != head]

    return _ablate_each(model, evaluate, layers, progress, others)


def pruning_curve(
    model: nn.Module,
    evaluate: Evaluate,
    scores: Tensor,
    *,
    share: float = 0.1,
    layers: Sequence[AttentionLayer] | None = None,
) -> Curve:
    """Remove heads cumulatively, the least important first, and evaluate each time `share` of all heads is removed.

    Args:
        model: as in `head_ablation`.
        evaluate: as in `head_ablation`; items are averaged.
        scores: importance of each head [L, M], nan for missing heads: `first_order_importance`, or the decrease of the
            metric under ablation.
        share: share of all heads that is removed between two evaluations; the paper uses a tenth.
        layers: the result of `find_attention_layers`; None calls it.
    """
    if not 0 < share <= 1:
        raise SelectionError(f"share={share}: choose a share of all heads, above 0 and at most 1")
    layers = find_attention_layers(model) if layers is None else layers
    heads = heads_of(layers)
    order = tuple(sorted(heads, key=lambda head: float(scores[head])))
    step = max(1, round(share * len(heads)))
    counts = tuple(dict.fromkeys([*range(0, len(heads), step), len(heads)]))
    return Curve(counts, tuple(_evaluate(model, evaluate, order[:n], layers)[0] for n in counts), order)


def greedy_pruning(
    model: nn.Module,
    evaluate: Evaluate,
    count: int,
    *,
    higher_is_better: bool = True,
    layers: Sequence[AttentionLayer] | None = None,
) -> Curve:
    """Remove `count` heads one by one, each time the head whose removal costs least.

    With H heads this takes about `count` x H evaluations. Arguments as in `head_ablation`.
    """
    layers = find_attention_layers(model) if layers is None else layers
    remaining = heads_of(layers)
    if not 0 < count <= len(remaining):
        raise SelectionError(f"count={count}: choose 1 to {len(remaining)}, since the model has {len(remaining)} heads")
    sign = 1 if higher_is_better else -1
    removed: list[Head] = []
    metric = [_evaluate(model, evaluate, [], layers)[0]]
    for _ in range(count):
        values = [_evaluate(model, evaluate, [*removed, head], layers)[0] for head in remaining]
        best = max(range(len(remaining)), key=lambda i: sign * values[i])
        metric.append(values[best])
        removed.append(remaining.pop(best))
    return Curve(tuple(range(count + 1)), tuple(metric), tuple(removed))


def heads_of(layers: Sequence[AttentionLayer]) -> list[Head]:
    """List every (layer, head) pair."""
    return [(row, head) for row, layer in enumerate(layers) for head in range(layer.num_heads)]


def _ablate_each(
    model: nn.Module,
    evaluate: Evaluate,
    layers: Sequence[AttentionLayer] | None,
    progress: Callable[[int, int], None] | None,
    choose: Callable[[AttentionLayer, int, int], list[Head]],
) -> Ablation:
    """Evaluate once for every head, without the heads that `choose(layer, row, head)` returns."""
    layers = find_attention_layers(model) if layers is None else layers
    heads = heads_of(layers)
    ran: set[str] = set()
    with replaced_head_outputs(layers, lambda layer, _: ran.add(layer.name)):
        baseline, per_item = _evaluate(model, evaluate, [], layers)
    check_hooks_ran(layers, ran)
    shape = (len(layers), max(layer.num_heads for layer in layers))
    change = torch.full(shape, torch.nan, dtype=torch.float64, device="cpu")  # [L, M]
    items = (
        None if per_item is None else torch.full((*shape, len(per_item)), torch.nan, dtype=torch.float64, device="cpu")
    )
    for done, (row, head) in enumerate(heads, 1):
        value, values = _evaluate(model, evaluate, choose(layers[row], row, head), layers)
        change[row, head] = value - baseline
        if items is not None and values is not None and per_item is not None:
            items[row, head] = values - per_item
        if progress is not None:
            progress(done, len(heads))
    return Ablation(tuple(layer.name for layer in layers), baseline, change, items)


@torch.no_grad()
def _evaluate(
    model: nn.Module, evaluate: Evaluate, heads: Iterable[Head], layers: Sequence[AttentionLayer]
) -> tuple[float, Tensor | None]:
    """Evaluate the metric without the given heads: return its mean, and its values per item [N] if there are any."""
    with evaluating(model), ablate(model, heads, layers=layers):
        value = evaluate(model)
    if isinstance(value, Tensor) and value.ndim:
        values = value.detach().double().flatten().cpu()  # [N]
        return float(values.mean()), values
    return float(value), None


def head_masks(layers: Sequence[AttentionLayer], heads: Iterable[tuple[int | str, int]]) -> Mapping[str, Tensor]:
    """Map each layer name to a mask of the heads that are ablated, bool [M]."""
    masks: dict[str, Tensor] = {}
    for place in heads:
        row, head = head_place(layers, place)
        chosen = layers[row]
        masks.setdefault(chosen.name, torch.zeros(chosen.num_heads, dtype=torch.bool, device="cpu"))[head] = True
    return masks


def head_place(layers: Sequence[AttentionLayer], place: object) -> tuple[int, int]:
    """Return a (layer, head) pair as two indices; the layer may be a name.

    Raises:
        SelectionError: it is not a pair, or there is no such layer or head.
    """
    if not isinstance(place, tuple | list) or len(place) != 2:
        raise SelectionError(f"{place!r} is not a head; expected a list of (layer, head) pairs, such as [(0, 1)]")
    layer, head = place
    names = [each.name for each in layers]
    row = names.index(layer) if isinstance(layer, str) and layer in names else _index(layer)
    if not 0 <= row < len(layers):
        listed = ", ".join(f"{i} {name}" for i, name in enumerate(names[:8]))
        raise SelectionError(f"no layer {layer!r}; the {len(names)} attention layers are {listed}")
    chosen, column = layers[row], _index(head)
    if not 0 <= column < chosen.num_heads:
        raise SelectionError(f"{chosen.name} has no head {head!r}; its heads are 0 to {chosen.num_heads - 1}")
    return row, column


def _index(value: Any) -> int:
    """Return a value as an index, and -1 if it is not a whole number; truth values are not numbers here."""
    is_truth = isinstance(value, bool) or getattr(value, "dtype", None) is torch.bool
    try:
        return -1 if is_truth else operator.index(value)
    except TypeError:
        return -1
