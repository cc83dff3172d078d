r"""Uncertainty of a classifier: entropy on in-domain and foreign (out-of-domain) inputs, and the head bootstrap.

A head i with its slice $W_i$ of the readout's first layer is a particle: the layer receives $z = b + \sum_i W_i m_i$, a
sum over particles in any order. Resampling the M particles with replacement, head i $n_i$ times, gives
$z^* = b + \sum_i n_i W_i m_i$ with mean z and the variance of a sum over M draws. The mean of the predictions over such
resamples is the *head bootstrap*. A single head is not such a sample: its sum has one term instead of M.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from repulsive.metrics.auc import auc
from repulsive.metrics.classification import entropy


@dataclass(frozen=True, eq=False)
class EntropyCDF:
    """Share of predictions with at most the given entropy; both float64 [points], entropy in nats from 0 to ln C."""

    entropy: Tensor
    share: Tensor


@dataclass(frozen=True, eq=False)
class Detection:
    """Detection of foreign inputs by the entropy of predictions.

    Args:
        auroc: probability that a foreign input has higher entropy than an in-domain input, ties count half; 0.5 is
            chance.
        inside: mean entropy of predictions on in-domain inputs, in nats.
        outside: mean entropy of predictions on foreign inputs, in nats.
    """

    auroc: float
    inside: float
    outside: float


def entropy_cdf(probabilities: Tensor, points: int = 101) -> EntropyCDF:
    r"""Empirical CDF of entropy, $F(h) = \frac1N \sum_n 1(H_n \le h)$, 0 <= h <= ln C (Louizos and Welling, 2017).

    On inputs unlike the training data, a curve further to the lower right is better: few confident predictions.

    Args:
        probabilities: predicted probabilities [N, C]; rows sum to one.
        points: number of points of the curve.

    Example:
        >>> entropy_cdf(torch.tensor([[1.0, 0.0], [0.5, 0.5]]), points=3).share.tolist()
        [0.5, 0.5, 1.0]
    """
    _check(probabilities)
    if points < 2:
        raise ValueError(f"points={points}: a curve needs at least 2")
    maximum = math.log(probabilities.shape[-1])
    grid = torch.linspace(0, maximum, points, dtype=torch.float64, device=probabilities.device)  # [points]
    entropies = entropy(probabilities).clamp(max=float(grid[-1])).sort().values  # [N]; rounding may exceed ln C
    share = torch.searchsorted(entropies, grid, right=True).double() / len(entropies)  # [points]
    return EntropyCDF(grid, share.masked_fill(entropies.isnan().any(), torch.nan))


def detect_foreign(inside: Tensor, outside: Tensor) -> Detection:
    """Measure how well the entropy of predictions detects foreign inputs.

    Args:
        inside: probabilities on in-domain inputs [N, C].
        outside: probabilities on foreign inputs [K, C].
    """
    _check(inside)
    _check(outside)
    low, high = entropy(inside), entropy(outside)
    return Detection(auroc(low, high), float(low.mean()), float(high.mean()))


def auroc(negative: Tensor, positive: Tensor) -> float:
    r"""AUROC, $\frac{1}{NK} \sum_{nk} 1(p_k > q_n) + \frac12 1(p_k = q_n)$, by ranks (Mann and Whitney, 1947).

    Args:
        negative: scores q [N] that should be low.
        positive: scores p [K] that should be high.
    """
    low, high = negative.double().flatten(), positive.double().flatten()
    if not len(low) or not len(high) or low.isnan().any() or high.isnan().any():
        raise ValueError("auroc needs at least one negative and one positive score, without NaN")
    labels = torch.arange(len(low) + len(high), device=low.device) >= len(low)  # [N + K]
    return auc(torch.cat([low, high]), labels)


def bootstrap_weights(heads: int, draws: int, generator: torch.Generator) -> Tensor:
    r"""Draw how often each head occurs in each resample, $n_k \sim \mathrm{Multinomial}(M; 1/M)$, float64 [K, M].

    Args:
        heads: number of heads M.
        draws: number of resamples K.
        generator: random number generator.
    """
    if heads < 1 or draws < 1:
        raise ValueError(f"heads={heads}, draws={draws}: need at least one of each")
    chosen = torch.randint(heads, (draws, heads), generator=generator, device="cpu")  # [K, M]
    return torch.nn.functional.one_hot(chosen, heads).sum(1).double()


def mixture(logits: Tensor) -> Tensor:
    r"""Mean of K predictions $\frac1K \sum_k \mathrm{softmax}(f_k)$, [K, N, C] -> float64 [N, C].

    Given `reweighted_logits(model, inputs, bootstrap_weights(M, K, generator))`, it is the head bootstrap.

    Args:
        logits: logits of each member for the same items.

    Example:
        >>> mixture(torch.tensor([[[9.0, -9.0]], [[-9.0, 9.0]]])).tolist()
        [[0.5, 0.5]]
    """
    if logits.ndim != 3 or not len(logits):
        raise ValueError(f"logits {list(logits.shape)}: need [K, N, C] with at least one member")
    return logits.double().softmax(-1).mean(0)


def _check(probabilities: Tensor) -> None:
    if probabilities.ndim != 2 or not len(probabilities) or probabilities.shape[1] < 2:
        raise ValueError(
            f"probabilities {list(probabilities.shape)}: need [N, C] with at least one item and two classes"
        )
