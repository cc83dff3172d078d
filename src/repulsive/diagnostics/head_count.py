r"""How many heads? The error against their number, and the curve that the paper's bound has the form of.

The bound on the error of M particles has a term in $1/\sqrt M$, which falls, and one in $M$, which grows. HeadCount
errors also hold what no number of heads removes, so the curve is

$$e(M) = \frac{a}{\sqrt M} + b M + c, \qquad a \ge 0,\; b \ge 0,$$

fitted by least squares over all runs. Where a and b are positive it is lowest at $M^* = (a / 2b)^{2/3}$.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from repulsive.metrics.student import interval


@dataclass(frozen=True)
class HeadCount:
    """The error with M heads.

    Args:
        heads: M.
        errors: one for each seed.
    """

    heads: int
    errors: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.errors)

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of the mean by Student's t over seeds; None for one seed."""
        return interval(self.errors)


@dataclass(frozen=True)
class HeadFit:
    """The curve a / sqrt(M) + b M + c."""

    a: float
    b: float
    c: float

    def at(self, heads: float) -> float:
        return self.a / math.sqrt(heads) + self.b * heads + self.c

    @property
    def best(self) -> float | None:
        """Where the curve is lowest; None where it only falls or only grows."""
        return (self.a / (2 * self.b)) ** (2 / 3) if self.a > 0 and self.b > 0 else None


def fit_heads(points: Sequence[HeadCount]) -> HeadFit:
    """Least squares over all runs with a, b >= 0 and c free.

    Of the four ways to hold a and b at zero or let them go, the one with the smallest error among those with no
    negative a or b: with two signs to keep that is the exact solution.

    Args:
        points: three different numbers of heads at least, or the curve is not determined.

    Raises:
        ValueError: there are fewer.

    Example:
        >>> fit = fit_heads([HeadCount(m, (2 / m**0.5 + 0.25 * m,)) for m in (1, 4, 9, 16)])
        >>> round(fit.a, 6), round(fit.b, 6), round(fit.best, 4)
        (2.0, 0.25, 2.5198)
    """
    if len({point.heads for point in points}) < 3:
        raise ValueError(f"{len(points)} numbers of heads: the curve needs three different ones at least")
    runs = [(point.heads, error) for point in points for error in point.errors]
    heads = torch.tensor([m for m, _ in runs], dtype=torch.float64)  # [R]
    errors = torch.tensor([error for _, error in runs], dtype=torch.float64)  # [R]
    columns = torch.stack([heads.rsqrt(), heads, torch.ones_like(heads)], 1)  # [R, 3]
    scale = columns.amax(0)  # M may be 100 times 1 / sqrt(M)
    found = []
    for free in ([0, 1, 2], [0, 2], [1, 2], [2]):
        solved = torch.zeros(3, dtype=torch.float64)
        solved[free] = torch.linalg.lstsq((columns / scale)[:, free], errors).solution
        if (solved[:2] >= 0).all():
            rest = float((columns / scale @ solved - errors).square().sum())
            found.append((rest, HeadFit(*(solved / scale).tolist())))
    return min(found, key=lambda each: each[0])[1]
