"""The measures of the GLUE tasks that accuracy is not: correlations, and the F1 of pairs that match.

Labels and guesses are [N]. scipy and scikit-learn give the same numbers, but where one side is constant: a correlation
with it is 0 here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from repulsive.metrics.ranks import ranks

_FLAT = 1e-13  # of a variance to the square of its numbers: what rounding in float64 makes of equal ones, and more


def matthews(guesses: Tensor, labels: Tensor) -> Tensor:
    r"""Matthews correlation of two classes, 0 and 1, from -1 to 1; 0 where either side has one class only.

    $(tp \cdot tn - fp \cdot fn) / \sqrt{(tp + fp)(tp + fn)(tn + fp)(tn + fn)}$ (Matthews, 1975).
    """
    _check(guesses, labels)
    return pearson(guesses, labels)  # of zeros and ones it is this


def f1(guesses: Tensor, labels: Tensor) -> Tensor:
    r"""$2 tp / (2 tp + fp + fn)$ of class 1; 0 where nobody has it."""
    _check(guesses, labels)
    hit = ((guesses == 1) & (labels == 1)).sum().double()
    return 2 * hit / ((guesses == 1).sum() + (labels == 1).sum()).clamp(min=1)


def pearson(first: Tensor, second: Tensor) -> Tensor:
    r"""$\sum_n \hat a_n \hat b_n / \sqrt{\sum_n \hat a_n^2 \sum_n \hat b_n^2}$, the hats without the mean."""
    _check(first, second)
    a, b = (x.double() - x.double().mean() for x in (first, second))  # [N]
    scale = (a.square().sum() * b.square().sum()).sqrt()
    constant = bool((first == first[0]).all()) or bool((second == second[0]).all())
    return torch.zeros_like(scale) if constant else ((a * b).sum() / scale).clamp(-1, 1)


def spearman(first: Tensor, second: Tensor) -> Tensor:
    """`pearson` of the ranks; equal values share the mean of theirs."""
    return pearson(ranks(first), ranks(second))


def counts(guesses: Tensor, labels: Tensor) -> Tensor:
    """What Matthews correlation and F1 need of each item, so that any selection of items can be scored.

    Returns:
        int32 [N, 4]: 1, the guess, the label and their product, for `matthews_of` and `f1_of`.
    """
    _check(guesses, labels)
    return torch.stack([torch.ones_like(labels), guesses, labels, guesses * labels], 1).int()


def moments(first: Tensor, second: Tensor) -> Tensor:
    """What Pearson correlation needs of each item: float64 [N, 6], for `pearson_of`."""
    _check(first, second)
    a, b = first.double(), second.double()
    return torch.stack([torch.ones_like(a), a, b, a * a, b * b, a * b], 1)


def matthews_of(totals: Tensor) -> Tensor:
    """`matthews` of summed `counts`, [..., 4] -> [...]: the products of a number that is 0 or 1 are itself."""
    n, g, y, both = totals.double().unbind(-1)
    return pearson_of(torch.stack([n, g, y, g, y, both], -1))


def f1_of(totals: Tensor) -> Tensor:
    """`f1` of summed `counts`, [..., 4] -> [...]."""
    _, g, y, both = totals.double().unbind(-1)
    return 2 * both / (g + y).clamp(min=1)


def pearson_of(totals: Tensor) -> Tensor:
    """`pearson` of summed `moments`, [..., 6] -> [...]; 0 where either side does not vary."""
    n, a, b, aa, bb, ab = totals.double().unbind(-1)
    spread = (n * aa - a * a) * (n * bb - b * b)
    varies = ~((n * aa - a * a <= _FLAT * n * aa) | (n * bb - b * b <= _FLAT * n * bb))  # nan stays nan
    return torch.where(varies, (n * ab - a * b) / spread.clamp(min=1e-300).sqrt(), 0.0)


def _check(first: Tensor, second: Tensor) -> None:
    if first.ndim != 1 or first.shape != second.shape or not len(first):
        raise ValueError(f"{list(first.shape)} and {list(second.shape)}: need [N] twice, with N > 0")
