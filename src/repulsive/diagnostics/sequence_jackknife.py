r"""Confidence intervals of similarity scores over sequences, by the delete-one jackknife.

Tokens of one sequence depend on each other, so sequences are resampled and not tokens. The sequences are divided into
$K \le 8$ groups. With the score $\theta$ of all sequences and $\theta_k$ of all but those of group k,

$$\theta \pm t_{K-1} \sqrt{\frac{K-1}{K} \sum_k (\theta_k - \bar\theta)^2}, \qquad
  \bar\theta = \frac1K \sum_k \theta_k,$$

where t is the quantile of Student's distribution. For the mean of one number per sequence and groups of equal size this
is the usual interval of the mean of the groups. The bootstrap would need hundreds of evaluations, the jackknife K.
"""

from __future__ import annotations

import math

from torch import Tensor

from repulsive.metrics.student import quantile

GROUPS = 8
LEVEL = 0.95


def count_groups(sequences: int) -> int:
    """Number of groups of sequences; below 2 there is no interval."""
    return min(GROUPS, sequences)


def jackknife_interval(value: float, left_out: Tensor) -> tuple[float, float] | None:
    """95 % confidence interval of a score; None for fewer than two groups, or if a score is nan.

    Args:
        value: the score of all sequences.
        left_out: the score without each group of sequences [K].
    """
    count = len(left_out)
    if count < 2 or math.isnan(value) or not left_out.isfinite().all():
        return None
    deviations = left_out.double() - left_out.double().mean()
    error = math.sqrt((count - 1) / count * float(deviations.square().sum()))
    half = quantile(LEVEL, count - 1) * error
    return value - half, value + half
