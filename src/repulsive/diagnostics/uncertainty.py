"""Does a classifier know what it does not know? Entropy of its predictions on familiar and on foreign inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from repulsive.metrics.classification import entropy


@dataclass(frozen=True, eq=False)
class EntropyCDF:
    """Share of predictions with at most this entropy, float64 [points] both; entropies in nats, from 0 to ln C."""

    entropy: Tensor
    share: Tensor


@dataclass(frozen=True, eq=False)
class Detection:
    """How well entropy tells foreign inputs from familiar ones.

    Args:
        auroc: probability that a foreign input has the higher entropy, ties counting half; 0.5 is chance.
        inside: mean entropy of predictions on familiar inputs, in nats.
        outside: mean entropy of predictions on foreign inputs, in nats.
    """

    auroc: float
    inside: float
    outside: float


def entropy_cdf(probabilities: Tensor, points: int = 101) -> EntropyCDF:
    r"""$F(h) = \frac1N \sum_n 1(H_n \le h)$ on equal steps from 0 to ln C (Louizos and Welling, 2017).

    On inputs unlike the training data a curve further to the lower right is better: few sure predictions.

    Args:
        probabilities: [N, C], rows that sum to one.
        points: of the curve.

    Example:
        >>> entropy_cdf(torch.tensor([[1.0, 0.0], [0.5, 0.5]]), points=3).share.tolist()
        [0.5, 0.5, 1.0]
    """
    _check(probabilities)
    if points < 2:
        raise ValueError(f"points={points}: a curve needs at least 2")
    most = math.log(probabilities.shape[-1])
    grid = torch.linspace(0, most, points, dtype=torch.float64, device=probabilities.device)  # [points]
    found = entropy(probabilities).clamp(max=float(grid[-1])).sort().values  # [N]; rounding can go above ln C
    return EntropyCDF(grid, torch.searchsorted(found, grid, right=True).double() / len(found))


def detect_foreign(inside: Tensor, outside: Tensor) -> Detection:
    """Tell foreign inputs by the entropy of the predictions on them.

    Args:
        inside: probabilities on familiar inputs [N, C].
        outside: probabilities on foreign inputs [K, C].
    """
    _check(inside)
    _check(outside)
    own, other = entropy(inside), entropy(outside)
    return Detection(auroc(own, other), float(own.mean()), float(other.mean()))


def auroc(negative: Tensor, positive: Tensor) -> float:
    r"""$\frac{1}{NK} \sum_{nk} 1(p_k > q_n) + \frac12 1(p_k = q_n)$, by ranks (Mann and Whitney, 1947).

    Args:
        negative: scores q [N] that should be low.
        positive: scores p [K] that should be high.
    """
    low, high = negative.double().flatten(), positive.double().flatten()
    if not len(low) or not len(high) or low.isnan().any() or high.isnan().any():
        raise ValueError("auroc needs scores on both sides, none of them NaN")
    low = low.sort().values
    below = torch.searchsorted(low, high, right=False)  # [K] negatives below each positive
    up_to = torch.searchsorted(low, high, right=True)  # [K] negatives below or equal
    return float((below + up_to).double().mean() / (2 * len(low)))


def _check(probabilities: Tensor) -> None:
    if probabilities.ndim != 2 or not len(probabilities) or probabilities.shape[1] < 2:
        raise ValueError(f"probabilities {list(probabilities.shape)}: need [N, C] with items and two classes or more")
