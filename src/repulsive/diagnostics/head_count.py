r"""Error as a function of the number of heads: fit a curve with the form of the paper's bound.

The bound on the error of M particles has a decreasing term in $1/\sqrt M$ and an increasing term in $M$. Measured
errors also have a constant part, so the curve is

$$e(M) = \frac{a}{\sqrt M} + b M + c, \qquad a \ge 0,\; b \ge 0,$$

fitted by least squares over all runs. If a and b are positive, the minimum is at $M^* = (a / 2b)^{2/3}$.
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
    """Errors of training runs with the same number of heads M.

    Args:
        heads: M.
        errors: the error of each seed.
    """

    heads: int
    errors: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return statistics.fmean(self.errors)

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of the mean over seeds, by Student's t; None for one seed."""
        return interval(self.errors)


@dataclass(frozen=True)
class HeadFit:
    """The fitted curve a / sqrt(M) + b M + c."""

    a: float
    b: float
    c: float

    def at(self, heads: float) -> float:
        """Evaluate the curve at a number of heads."""
        return self.a / math.sqrt(heads) + self.b * heads + self.c

    @property
    def best(self) -> float | None:
        """Number of heads at the minimum; None if the curve is monotonic."""
        return (self.a / (2 * self.b)) ** (2 / 3) if self.a > 0 and self.b > 0 else None


def fit_heads(points: Sequence[HeadCount]) -> HeadFit:
    """Fit the curve by least squares over all runs, with a, b >= 0 and c free.

    Each of a and b is either free or fixed at zero, which gives four fits. Among the fits without a negative a or b,
    the fit with the smallest error is the exact solution.

    Args:
        points: errors for at least three different numbers of heads.

    Raises:
        ValueError: there are fewer than three different numbers of heads.

    Example:
        >>> fit = fit_heads([HeadCount(m, (2 / m**0.5 + 0.25 * m,)) for m in (1, 4, 9, 16)])
        >>> round(fit.a, 6), round(fit.b, 6), round(fit.best, 4)
        (2.0, 0.25, 2.5198)
    """
    if len({point.heads for point in points}) < 3:
        raise ValueError(f"{len(points)} points: the curve needs at least three different numbers of heads")
    runs = [(point.heads, error) for point in points for error in point.errors]
    heads = torch.tensor([m for m, _ in runs], dtype=torch.float64, device="cpu")  # [R]
    errors = torch.tensor([error for _, error in runs], dtype=torch.float64, device="cpu")  # [R]
    columns = torch.stack([heads.rsqrt(), heads, torch.ones_like(heads)], 1)  # [R, 3]
    scale = columns.amax(0)  # M may be 100 times larger than 1 / sqrt(M)
    fits = []
    for free in ([0, 1, 2], [0, 2], [1, 2], [2]):
        solved = torch.zeros(3, dtype=torch.float64, device="cpu")
        solved[free] = torch.linalg.lstsq((columns / scale)[:, free], errors).solution
        if (solved[:2] >= 0).all():
            residual = float((columns / scale @ solved - errors).square().sum())
            fits.append((residual, HeadFit(*(solved / scale).tolist())))
    return min(fits, key=lambda fit: fit[0])[1]
