"""Do judges agree with each other more than chance would have it?"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Agreement:
    """Fleiss' kappa and what it is made of; None where it is not defined.

    Args:
        kappa: 1 for judges who always agree, 0 for chance. None where no item has two answers, or all are equal.
        observed: how often two answers to one item agree.
        expected: how often they would by chance.
        items: those with two answers or more.
    """

    kappa: float | None
    observed: float | None
    expected: float | None
    items: int


def fleiss_kappa(counts: Tensor) -> Agreement:
    r"""Agreement of any number of judges who put items into categories.

    With $n_{ij}$ judges who put item i into category j, $n_i = \sum_j n_{ij}$,

    $$P_i = \frac{\sum_j n_{ij} (n_{ij} - 1)}{n_i (n_i - 1)}, \quad p_j = \frac1N \sum_i \frac{n_{ij}}{n_i}, \quad
    \kappa = \frac{\bar P - \sum_j p_j^2}{1 - \sum_j p_j^2}.$$

    Fleiss (1971) has the same number of answers for every item. Where answers are missing this is Gwet's extension
    (Handbook of Inter-Rater Reliability, 2014): $\bar P$ is over items with at least two answers, $p_j$ over items
    with at least one; items with none say nothing.

    Args:
        counts: $n_{ij}$, [N, categories].

    Example:
        >>> fleiss_kappa(Tensor([[3, 0], [0, 3]])).kappa
        1.0
    """
    n = counts.double()
    n = n[n.sum(1) > 0]  # [N, J]
    total = n.sum(1)
    several = total > 1
    if not several.any():
        return Agreement(None, None, None, 0)
    alike = (n * (n - 1)).sum(1)[several] / (total * (total - 1))[several]  # [items]
    observed = float(alike.mean())
    expected = float((n / total[:, None]).mean(0).square().sum())
    kappa = None if expected > 1 - 1e-12 else (observed - expected) / (1 - expected)
    return Agreement(kappa, observed, expected, int(several.sum()))
