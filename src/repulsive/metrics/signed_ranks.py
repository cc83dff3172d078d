r"""Wilcoxon's signed-rank interval and the Hodges-Lehmann estimate: the centre of a few numbers, robust to outliers.

For a symmetric distribution of n numbers, let T be the number of Walsh averages $(x_i + x_j) / 2$, $i \le j$, below
the centre. T is distributed as the sum of the ranks 1 ... n with random signs, so that order statistics of the Walsh
averages are the ends of an interval with a known probability (Hollander, Wolfe and Chicken, 2014, section 3.3).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

MOST_EXACT = 100  # above this many numbers, T counts as normally distributed


def least_count(level: float = 0.95) -> int:
    """Return the smallest number of values that have an interval of the given level.

    Example:
        >>> least_count(0.95)
        6
    """
    return math.ceil(1 - math.log2(1 - level))


def hodges_lehmann(values: Sequence[float]) -> float:
    """Compute the Hodges-Lehmann estimate: the median of all Walsh averages.

    Example:
        >>> hodges_lehmann([1.0, 2.0, 300.0])
        76.25
    """
    return statistics.median(_walsh_averages(values))


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """Confidence interval of the centre by Wilcoxon's signed ranks; None if there are fewer than `least_count` numbers.

    Args:
        values: the numbers.
        level: the probability that the interval contains the centre, at least; up to 100 numbers it is exact.

    Raises:
        ValueError: the level is not between 0 and 1.
    """
    if not 0 < level < 1:
        raise ValueError(f"level={level} must lie between 0 and 1")
    averages = sorted(_walsh_averages(values))
    left_out = _left_out(len(values), level)
    return None if left_out < 1 else (averages[left_out - 1], averages[-left_out])


def _walsh_averages(values: Sequence[float]) -> list[float]:
    return [(one + other) / 2 for i, one in enumerate(values) for other in values[: i + 1]]


def _left_out(count: int, level: float) -> int:
    """Return the largest k with P(T < k) <= (1 - level) / 2: the k-th Walsh average from each end bounds the centre."""
    tail = (1 - level) / 2
    if count > MOST_EXACT:
        mean, variance = count * (count + 1) / 4, count * (count + 1) * (2 * count + 1) / 24
        return math.floor(statistics.NormalDist(mean, math.sqrt(variance)).inv_cdf(tail) + 0.5)
    signs = [1]  # signs[t]: number of ways to choose signs so that the sum of positive ranks is t
    for rank in range(1, count + 1):
        padded = [*signs, *[0] * rank]
        signs = [ways + (padded[t - rank] if t >= rank else 0) for t, ways in enumerate(padded)]
    below, k = 0, 0
    while k < len(signs) and below + signs[k] <= tail * 2**count:
        below += signs[k]
        k += 1
    return k
