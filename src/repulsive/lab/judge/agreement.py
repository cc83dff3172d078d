"""Agreement between judges: Fleiss' kappa."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Agreement:
    """Fleiss' kappa and its components; None if undefined.

    Args:
        kappa: 1 if judges always agree, 0 for chance agreement. None if no item has two answers, or if all answers
            are equal.
        observed: observed agreement between two answers to the same item.
        expected: agreement expected by chance.
        items: number of items with at least two answers.
    """

    kappa: float | None
    observed: float | None
    expected: float | None
    items: int


def fleiss_kappa(counts: Tensor) -> Agreement:
    r"""Compute Fleiss' kappa for any number of judges who assign items to categories.

    With $n_{ij}$ judges who assign item i to category j and $n_i = \sum_j n_{ij}$,

    $$P_i = \frac{\sum_j n_{ij} (n_{ij} - 1)}{n_i (n_i - 1)}, \quad p_j = \frac1N \sum_i \frac{n_{ij}}{n_i}, \quad
    \kappa = \frac{\bar P - \sum_j p_j^2}{1 - \sum_j p_j^2}.$$

    Fleiss (1971) assumes the same number of answers for every item. For missing answers this is Gwet's extension
    (Handbook of Inter-Rater Reliability, 2014): $\bar P$ is the mean over items with at least two answers, $p_j$ over
    items with at least one answer.

    Args:
        counts: $n_{ij}$, [N, categories].

    Example:
        >>> fleiss_kappa(Tensor([[3, 0], [0, 3]])).kappa
        1.0
    """
    n = counts.double()
    n = n[n.sum(1) > 0]  # [N, J]
    total = n.sum(1)
    comparable = total > 1
    if not comparable.any():
        return Agreement(None, None, None, 0)
    agreement = (n * (n - 1)).sum(1)[comparable] / (total * (total - 1))[comparable]  # [items]
    observed = float(agreement.mean())
    expected = float((n / total[:, None]).mean(0).square().sum())
    kappa = None if expected > 1 - 1e-12 else (observed - expected) / (1 - expected)
    return Agreement(kappa, observed, expected, int(comparable.sum()))
