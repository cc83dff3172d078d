"""Student's t distribution: quantiles, and confidence intervals of the mean of a few numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def quantile(level: float, degrees: int) -> float:
    r"""Two-sided quantile of Student's t: the t with $P(|T| \le t)$ = level, for integer degrees of freedom.

    With $t = \sqrt\nu \tan\theta$ the probability is a finite sum of powers of $\cos\theta$. It grows with $\theta$,
    so bisection finds t.

    Args:
        level: probability, such as 0.95.
        degrees: degrees of freedom.

    Raises:
        ValueError: the level is not between 0 and 1, or there are no degrees of freedom.

    Example:
        >>> round(quantile(0.95, 2), 3)
        4.303
    """
    if not 0 < level < 1 or degrees < 1:
        raise ValueError(f"level={level} must lie between 0 and 1, and degrees={degrees} at least 1")
    low, high = 0.0, math.pi / 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _within(middle, degrees) < level else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _within(angle: float, degrees: int) -> float:
    """Compute the probability P(|T| <= sqrt(degrees) tan(angle))."""
    sine, cosine, odd = math.sin(angle), math.cos(angle), degrees % 2
    term, total = cosine if odd else 1.0, 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def half_width(values: Sequence[float], level: float = 0.95) -> float:
    """Half-width of the confidence interval of the mean of at least two numbers."""
    deviation = statistics.stdev(values)
    return quantile(level, len(values) - 1) * deviation / math.sqrt(len(values))


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """Confidence interval of the mean; None if there are fewer than two numbers."""
    if len(values) < 2:
        return None
    mean, half = statistics.fmean(values), half_width(values, level)
    return mean - half, mean + half
