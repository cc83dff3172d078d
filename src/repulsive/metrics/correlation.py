"""Correlations and F1: the metrics of GLUE tasks that are not scored by accuracy.

Predictions and labels are [N]. scipy and scikit-learn give the same numbers, except for constant input: a correlation
with a constant is 0 here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from repulsive.metrics.ranks import ranks

_CONSTANT = 1e-13  # variance / mean square below this is float64 rounding error: the numbers are all equal


def matthews(predictions: Tensor, labels: Tensor) -> Tensor:
    r"""Matthews correlation of two classes, 0 and 1, from -1 to 1; 0 if predictions or labels have only one class.

    $(tp \cdot tn - fp \cdot fn) / \sqrt{(tp + fp)(tp + fn)(tn + fp)(tn + fn)}$ (Matthews, 1975).
    """
    _check(predictions, labels)
    return pearson(predictions, labels)  # Matthews and Pearson correlation are equal for zeros and ones


def f1(predictions: Tensor, labels: Tensor) -> Tensor:
    r"""F1 score of class 1, $2 tp / (2 tp + fp + fn)$; 0 if class 1 is neither predicted nor a label."""
    _check(predictions, labels)
    hits = ((predictions == 1) & (labels == 1)).sum().double()
    return 2 * hits / ((predictions == 1).sum() + (labels == 1).sum()).clamp(min=1)


def pearson(first: Tensor, second: Tensor) -> Tensor:
    r"""Pearson correlation, $\sum_n \hat a_n \hat b_n / \sqrt{\sum_n \hat a_n^2 \sum_n \hat b_n^2}$, hats centred."""
    _check(first, second)
    a, b = (x.double() - x.double().mean() for x in (first, second))  # [N]
    scale = (a.square().sum() * b.square().sum()).sqrt()
    constant = bool((first == first[0]).all()) or bool((second == second[0]).all())
    return torch.zeros_like(scale) if constant else ((a * b).sum() / scale).clamp(-1, 1)


def spearman(first: Tensor, second: Tensor) -> Tensor:
    """Spearman correlation: the Pearson correlation of the ranks."""
    return pearson(ranks(first), ranks(second))


def counts(predictions: Tensor, labels: Tensor) -> Tensor:
    """Compute per-item terms whose sums give the Matthews correlation and F1 of any subset of the items.

    Returns:
        int32 [N, 4]: 1, the prediction, the label and their product, for `matthews_of` and `f1_of`.
    """
    _check(predictions, labels)
    return torch.stack([torch.ones_like(labels), predictions, labels, predictions * labels], 1).int()


def moments(first: Tensor, second: Tensor) -> Tensor:
    """Compute per-item terms whose sums give the Pearson correlation: float64 [N, 6], for `pearson_of`."""
    _check(first, second)
    a, b = first.double(), second.double()
    return torch.stack([torch.ones_like(a), a, b, a * a, b * b, a * b], 1)


def matthews_of(totals: Tensor) -> Tensor:
    """Matthews correlation from summed `counts`, [..., 4] -> [...]."""
    n, p, y, both = totals.double().unbind(-1)
    return pearson_of(torch.stack([n, p, y, p, y, both], -1))  # 0 and 1 are their own squares


def f1_of(totals: Tensor) -> Tensor:
    """F1 score of class 1 from summed `counts`, [..., 4] -> [...]."""
    _, p, y, both = totals.double().unbind(-1)
    return 2 * both / (p + y).clamp(min=1)


def pearson_of(totals: Tensor) -> Tensor:
    """Pearson correlation from summed `moments`, [..., 6] -> [...]; 0 if either variable is constant."""
    n, a, b, aa, bb, ab = totals.double().unbind(-1)
    spread = (n * aa - a * a) * (n * bb - b * b)
    varies = ~((n * aa - a * a <= _CONSTANT * n * aa) | (n * bb - b * b <= _CONSTANT * n * bb))  # nan stays nan
    return torch.where(varies, (n * ab - a * b) / spread.clamp(min=1e-300).sqrt(), 0.0)


def _check(first: Tensor, second: Tensor) -> None:
    if first.ndim != 1 or first.shape != second.shape or not len(first):
        raise ValueError(f"expected two tensors [N] with N > 0, got {list(first.shape)} and {list(second.shape)}")
