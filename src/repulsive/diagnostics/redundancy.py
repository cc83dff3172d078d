r"""Which heads could go: take them away one by one, all but one, or more and more of them (Michel et al., 2019).

Attention is $\sum_h \xi_h W^O_h o_h$ with every $\xi_h = 1$. A head is ablated by $\xi_h = 0$ at test time, without
retraining and without rescaling the others. Heads are query heads; layers are counted as `find_outlets` lists them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from repulsive.diagnostics.hooks.calling import evaluating
from repulsive.diagnostics.hooks.capture import refuse_silence
from repulsive.diagnostics.hooks.outlets import Outlet, find_outlets, rerouted
from repulsive.errors import SelectionError

Head = tuple[int, int]  # layer, head
Evaluate = Callable[[nn.Module], float | Tensor]  # a number, or one per item [N]


@dataclass(frozen=True, eq=False)
class Ablation:
    """What taking heads away does to a metric.

    Args:
        layers: names of the attention layers.
        baseline: the metric of the whole model.
        change: metric minus baseline [L, M], float64; nan where a layer has fewer heads.
        items: the same for each item [L, M, N], where the metric is given per item.
    """

    layers: tuple[str, ...]
    baseline: float
    change: Tensor
    items: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Curve:
    """A metric as heads go: after `removed[k]` heads, those first in `order`, it is `metric[k]`."""

    removed: tuple[int, ...]
    metric: tuple[float, ...]
    order: tuple[Head, ...]


@contextmanager
def ablate(
    model: nn.Module, heads: Iterable[tuple[int | str, int]], *, outlets: Sequence[Outlet] | None = None
) -> Iterator[None]:
    """Zero what leaves these heads, at the input of the output projection; at the end the model is as before.

    Args:
        model: any module with heads that `find_heads` finds.
        heads: (layer, head) pairs; a layer is its place in `find_outlets(model)` or its name.
        outlets: what `find_outlets` returned; None: found here.

    Raises:
        SelectionError: there is no such layer or head.

    Example:
        >>> model = nn.MultiheadAttention(8, 2, batch_first=True)
        >>> with ablate(model, [(0, 0), (0, 1)]):
        ...     out, _ = model(*[torch.ones(1, 3, 8)] * 3)
        >>> torch.equal(out, model.out_proj.bias.expand(1, 3, 8))
        True
    """
    outlets = find_outlets(model) if outlets is None else outlets
    off = _masks(outlets, heads)
    heard: set[str] = set()

    def silence(outlet: Outlet, leaving: Tensor) -> Tensor:
        heard.add(outlet.name)
        return leaving.masked_fill(off[outlet.name].to(leaving.device).unsqueeze(-1), 0)  # [B, T, M, d]

    with rerouted([outlet for outlet in outlets if outlet.name in off], silence):
        yield
    if off and not heard:
        warnings.warn(f"ablate: the model never reached {', '.join(off)}, so no head was off", stacklevel=3)


def head_ablation(
    model: nn.Module,
    evaluate: Evaluate,
    *,
    outlets: Sequence[Outlet] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Ablation:
    """Take away each head alone: as many evaluations as there are heads, and one more.

    Args:
        model: any module with heads that `find_heads` finds; it is evaluated in evaluation mode, without gradients.
        evaluate: called with the model; a number, or a tensor with one number per item.
        outlets: what `find_outlets` returned; None: found here.
        progress: called with how many evaluations are done, and of how many.
    """
    return _each(model, evaluate, outlets, progress, lambda _, layer, head: [(layer, head)])


def all_but_one(
    model: nn.Module,
    evaluate: Evaluate,
    *,
    outlets: Sequence[Outlet] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Ablation:
    """Leave each head alone in its layer; other layers stay whole. Arguments as in `head_ablation`."""

    def others(outlet: Outlet, layer: int, head: int) -> list[Head]:
        return [(layer, other) for other in range(outlet.num_heads) if other != head]

    return _each(model, evaluate, outlets, progress, others)


def pruning_curve(
    model: nn.Module,
    evaluate: Evaluate,
    scores: Tensor,
    *,
    share: float = 0.1,
    outlets: Sequence[Outlet] | None = None,
) -> Curve:
    """Take heads away for good, the least important first, a share of all at a time.

    Args:
        model: as in `head_ablation`.
        evaluate: as in `head_ablation`; items are averaged.
        scores: how important each head is [L, M], nan where there is none: `first_order_importance`, or what a head's
            ablation costs.
        share: of all heads, removed between two evaluations; a tenth as in the source.
        outlets: what `find_outlets` returned; None: found here.
    """
    if not 0 < share <= 1:
        raise SelectionError(f"share={share}: choose a share of all heads between 0 and 1")
    outlets = find_outlets(model) if outlets is None else outlets
    heads = heads_of(outlets)
    order = tuple(sorted(heads, key=lambda head: float(scores[head])))
    step = max(1, round(share * len(heads)))
    counts = tuple(dict.fromkeys([*range(0, len(heads), step), len(heads)]))
    return Curve(counts, tuple(_score(model, evaluate, order[:n], outlets)[0] for n in counts), order)


def greedy_pruning(
    model: nn.Module,
    evaluate: Evaluate,
    count: int,
    *,
    higher_is_better: bool = True,
    outlets: Sequence[Outlet] | None = None,
) -> Curve:
    """Take `count` heads away one after the other, each time the one whose absence costs least then.

    With H heads this is about `count` x H evaluations. Arguments as in `head_ablation`.
    """
    outlets = find_outlets(model) if outlets is None else outlets
    left = heads_of(outlets)
    if not 0 < count <= len(left):
        raise SelectionError(f"count={count}: the model has {len(left)} heads")
    sign = 1 if higher_is_better else -1
    gone: list[Head] = []
    metric = [_score(model, evaluate, [], outlets)[0]]
    for _ in range(count):
        found = [_score(model, evaluate, [*gone, head], outlets)[0] for head in left]
        best = max(range(len(left)), key=lambda i: sign * found[i])
        metric.append(found[best])
        gone.append(left.pop(best))
    return Curve(tuple(range(count + 1)), tuple(metric), tuple(gone))


def heads_of(outlets: Sequence[Outlet]) -> list[Head]:
    """Every (layer, head)."""
    return [(layer, head) for layer, outlet in enumerate(outlets) for head in range(outlet.num_heads)]


def _each(
    model: nn.Module,
    evaluate: Evaluate,
    outlets: Sequence[Outlet] | None,
    progress: Callable[[int, int], None] | None,
    chosen: Callable[[Outlet, int, int], list[Head]],
) -> Ablation:
    outlets = find_outlets(model) if outlets is None else outlets
    heads = heads_of(outlets)
    heard: set[str] = set()
    with rerouted(outlets, lambda outlet, _: heard.add(outlet.name)):
        baseline, per_item = _score(model, evaluate, [], outlets)
    refuse_silence(outlets, heard)
    shape = (len(outlets), max(outlet.num_heads for outlet in outlets))
    change = torch.full(shape, torch.nan, dtype=torch.float64)  # [L, M]
    items = None if per_item is None else torch.full((*shape, len(per_item)), torch.nan, dtype=torch.float64)
    for done, (layer, head) in enumerate(heads, 1):
        value, each = _score(model, evaluate, chosen(outlets[layer], layer, head), outlets)
        change[layer, head] = value - baseline
        if items is not None and each is not None and per_item is not None:
            items[layer, head] = each - per_item
        if progress is not None:
            progress(done, len(heads))
    return Ablation(tuple(outlet.name for outlet in outlets), baseline, change, items)


@torch.no_grad()
def _score(
    model: nn.Module, evaluate: Evaluate, heads: Iterable[Head], outlets: Sequence[Outlet]
) -> tuple[float, Tensor | None]:
    """The metric with these heads off: its mean, and its items [N] where there are some."""
    with evaluating(model), ablate(model, heads, outlets=outlets):
        value = evaluate(model)
    if isinstance(value, Tensor) and value.ndim:
        each = value.detach().double().flatten().cpu()  # [N]
        return float(each.mean()), each
    return float(value), None


def _masks(outlets: Sequence[Outlet], heads: Iterable[tuple[int | str, int]]) -> Mapping[str, Tensor]:
    """Which heads of each layer are off, bool [M]."""
    names = [outlet.name for outlet in outlets]
    off: dict[str, Tensor] = {}
    for layer, head in heads:
        place = names.index(layer) if layer in names else layer
        if not isinstance(place, int) or not 0 <= place < len(outlets):
            listed = ", ".join(f"{i} {name}" for i, name in enumerate(names[:8]))
            raise SelectionError(f"layer {layer!r}: there are {len(names)} attention layers: {listed}")
        outlet = outlets[place]
        if not 0 <= head < outlet.num_heads:
            raise SelectionError(f"head {head} of {outlet.name}: its heads are 0 to {outlet.num_heads - 1}")
        off.setdefault(outlet.name, torch.zeros(outlet.num_heads, dtype=torch.bool))[head] = True
    return off
