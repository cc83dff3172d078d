r"""Compare the heads of two versions of a model, such as before and after repulsion or pruning.

The inputs are split into up to eight groups. Each group gives one difference of the mean cosine of attention logits
(after minus before, mean over pairs and layers). The interval is Student's t over these differences: it says whether
*these two models* would differ on other inputs of the same kind. It says nothing about other training runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.diagnostics.circuits import circuit_similarity
from repulsive.diagnostics.hooks.calling import items_in
from repulsive.diagnostics.inspection import Inspection, inspect_heads
from repulsive.errors import DataError, HeadLayoutError
from repulsive.heads import HeadGroup
from repulsive.heads.module_paths import module_of
from repulsive.metrics.student import half_width

GROUPS, MIN_GROUPS, LEVEL = 8, 4, 0.95
MATCHED = 0.5  # smallest cosine of the weights of two heads that count as the same head
Column = tuple[int | None, int | None]  # head before, head after; None: that model does not have it


@dataclass(frozen=True)
class Difference:
    """Difference of the mean cosine of attention logits, after minus before.

    Args:
        before: mean cosine before, for each group of inputs.
        after: mean cosine after, for the same groups.
    """

    before: tuple[float, ...] = ()
    after: tuple[float, ...] = ()

    @property
    def mean(self) -> float:
        """Mean difference; nan without groups."""
        values = self._values()
        return statistics.fmean(values) if values else math.nan

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of the mean difference; None for fewer than four groups."""
        values = self._values()
        if len(values) < MIN_GROUPS:
            return None
        half = half_width(values, LEVEL)
        return self.mean - half, self.mean + half

    def _values(self) -> list[float]:
        return [after - before for before, after in zip(self.before, self.after, strict=True)]


@dataclass(frozen=True, eq=False)
class ModelComparison:
    """Two inspections and how their heads correspond.

    Args:
        before: inspection of the first model.
        after: inspection of the second model, on the same inputs.
        columns: for each layer, the heads of both models that correspond.
        difference: difference in the similarity of attention logits.
        notes: what could not be compared, and why.
    """

    before: Inspection
    after: Inspection
    columns: list[list[Column]]
    difference: Difference = Difference()
    notes: tuple[str, ...] = ()

    @property
    def removed(self) -> list[tuple[int, int]]:
        """Heads that only the first model has, as (index in `layers`, head)."""
        return [(row, b) for row, each in enumerate(self.columns) for b, a in each if a is None and b is not None]

    @property
    def added(self) -> list[tuple[int, int]]:
        """Heads that only the second model has, as (index in `layers`, head)."""
        return [(row, a) for row, each in enumerate(self.columns) for b, a in each if b is None and a is not None]


def compare_models(
    before: nn.Module,
    after: nn.Module,
    batches: Sequence[Any] = (),
    *,
    ablation: bool = False,
    twins: int = 3,
    separators: Sequence[int] = (),
    progress: Callable[[int, int], None] | None = None,
) -> ModelComparison:
    """Inspect two versions of a model on the same inputs and compare their heads.

    Args:
        before: the first model.
        after: the second model, with as many attention layers.
        batches: inputs of both; without inputs only weights are compared.
        ablation: also ablate each head of both models.
        twins: number of untrained twins of each model.
        separators: token ids that separate sentences.
        progress: as in `ablate_output`.

    Raises:
        DataError: the models have different numbers of attention layers.
    """
    settings: dict[str, Any] = {"ablation": ablation, "twins": twins, "separators": separators, "progress": progress}
    first = inspect_heads(before, batches, **settings)
    counts = len(first.layers), len({module_of(group) for group in first.groups})
    second = inspect_heads(after, batches, **settings)
    others = len(second.layers), len({module_of(group) for group in second.groups})
    if counts != others:
        raise DataError(
            f"--compare: expected two versions of one model, found {counts[1]} and {others[1]} attention layers"
        )
    columns, notes = [], []
    for (name, *_, heads), (other, *_, other_heads) in zip(first.layers, second.layers, strict=True):
        own, others_own = _weights(first.groups, name, heads), _weights(second.groups, other, other_heads)
        # Key-value heads are shared in one model and may not be in the other: compare the parts that both have.
        shared = [part for part in own if part in others_own]
        pairs, is_clear = match_heads(_joined(own, shared, heads), _joined(others_own, shared, other_heads))
        columns.append(pairs)
        if not is_clear:
            notes.append(
                f"{first.label(name)}: the weights do not show which heads correspond, so heads are matched by position"
            )
    try:
        difference = _difference(before, after, batches, first.groups, second.groups)
    except HeadLayoutError as error:
        difference, notes = Difference(), [*notes, str(error)]
    return ModelComparison(first, second, columns, difference, tuple(notes))


def match_heads(before: Tensor, after: Tensor) -> tuple[list[Column], bool]:
    """Match the heads of a layer in two models; equal numbers of heads correspond by position.

    If the numbers differ, heads are matched by their weights: the order of heads is kept, every head of the smaller
    model has a partner, and the sum of cosines is the largest possible.

    Args:
        before: weights of each head [M, D].
        after: weights of each head in the other model [N, D'].

    Returns:
        The pairs in order, and False if the weights do not show which heads correspond (a cosine below 0.5).

    Example:
        >>> match_heads(torch.eye(3), torch.eye(3)[1:])
        ([(0, None), (1, 0), (2, 1)], True)
    """
    many, few = len(before), len(after)
    if many == few:
        return [(head, head) for head in range(many)], True
    if before.shape[1:] != after.shape[1:]:
        return _by_position(many, few), False
    units = [torch.nn.functional.normalize(x.double(), dim=-1) for x in (before, after)]
    cosines = units[0] @ units[1].T  # [M, N]
    partners = _best_partners(cosines if many > few else cosines.T)  # of each head of the smaller model
    if any(float((cosines if many > few else cosines.T)[own, head]) < MATCHED for head, own in enumerate(partners)):
        return _by_position(many, few), False
    of_larger = {own: head for head, own in enumerate(partners)}
    larger = range(max(many, few))
    if many > few:
        return [(head, of_larger.get(head)) for head in larger], True
    return [(of_larger.get(head), head) for head in larger], True


def split_batches(batches: Sequence[Any], groups: int = GROUPS) -> list[Any]:
    """Split batches into at most about `groups` smaller ones of consecutive items.

    Args:
        batches: inputs, each a tensor, a tuple of arguments or a mapping.
        groups: desired number; every batch is split into equal parts of at least one item.
    """
    total = sum(items_in(batch) for batch in batches)
    size = max(1, math.ceil(total / groups))
    return [
        _items(batch, items_in(batch), start, start + size)
        for batch in batches
        for start in range(0, items_in(batch), size)
    ]


def _items(value: Any, count: int, start: int, stop: int) -> Any:
    """Select items from everything in a batch that has one entry per item."""
    if isinstance(value, Tensor):
        return value[start:stop] if value.ndim and len(value) == count else value
    if isinstance(value, Mapping):
        return {name: _items(each, count, start, stop) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_items(each, count, start, stop) for each in value)
    return value


def _difference(
    before: nn.Module, after: nn.Module, batches: Sequence[Any], groups: list[HeadGroup], others: list[HeadGroup]
) -> Difference:
    parts = split_batches(batches) if batches else []
    pairs = [(_mean_similarity(before, part, groups), _mean_similarity(after, part, others)) for part in parts]
    finite = [pair for pair in pairs if all(map(math.isfinite, pair))]
    return Difference(tuple(pair[0] for pair in finite), tuple(pair[1] for pair in finite))


def _mean_similarity(model: nn.Module, batch: Any, groups: list[HeadGroup]) -> float:
    """Mean cosine of attention logits over pairs of heads and layers; nan if no layer has two heads."""
    means = [each.mean for each in circuit_similarity(model, [batch], groups=groups).logits if each.num_heads > 1]
    return statistics.fmean(means) if means else math.nan


def _weights(groups: Sequence[HeadGroup], layer: str, heads: int) -> dict[str, Tensor]:
    """Return the weights of each head of a layer [M, D], for every part (q, k, v) with one slice per head."""
    own = [group for group in groups if module_of(group) == layer and group.num_heads == heads]
    return {group.part: group.read().detach().float().cpu() for group in own}


def _joined(weights: dict[str, Tensor], parts: Sequence[str], heads: int) -> Tensor:
    """Join the weights of some parts of each head, [M, D]; zeros if there are none."""
    return torch.cat([weights[part] for part in parts], -1) if parts else torch.zeros(heads, 1, device="cpu")


def _by_position(many: int, few: int) -> list[Column]:
    return [(i if i < many else None, i if i < few else None) for i in range(max(many, few))]


def _best_partners(cosines: Tensor) -> list[int]:
    """Choose increasing rows, one for each column of [M, N] with M > N, with the largest sum of entries."""
    rows, columns = cosines.shape
    best = torch.full((columns + 1, rows + 1), -torch.inf, dtype=torch.float64, device="cpu")
    best[0] = 0.0  # best[n, m]: largest sum for the first n columns within the first m rows
    for n in range(1, columns + 1):
        for m in range(n, rows + 1):
            best[n, m] = max(best[n, m - 1], best[n - 1, m - 1] + cosines[m - 1, n - 1])
    result, m = [], rows
    for n in range(columns, 0, -1):
        while best[n, m] == best[n, m - 1]:
            m -= 1
        m -= 1
        result.append(m)
    return result[::-1]
