"""Is a classifier as often right as it is sure? The numbers of a reliability diagram."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from repulsive.metrics.classification import binned


@dataclass(frozen=True, eq=False)
class Reliability:
    """One number per bin of confidence, the intervals (lower, upper]; all float64 [bins] but the counts.

    Args:
        lower: edges of the bins.
        upper: edges of the bins.
        confidence: mean winning probability; nan in an empty bin.
        accuracy: share of right predictions; nan in an empty bin.
        count: items, int64.
    """

    lower: Tensor
    upper: Tensor
    confidence: Tensor
    accuracy: Tensor
    count: Tensor

    @property
    def gap(self) -> Tensor:
        """Confidence minus accuracy, [bins]: above zero where the classifier is too sure."""
        return self.confidence - self.accuracy

    @property
    def ece(self) -> float:
        r"""$\sum_b \frac{|B_b|}{N} |acc_b - conf_b|$, expected calibration error (Guo et al., 2017)."""
        return float((self._share() * self._filled(self.gap).abs()).sum())

    @property
    def oe(self) -> float:
        r"""$\sum_b \frac{|B_b|}{N} conf_b \max(conf_b - acc_b, 0)$, overconfidence (Thulasidasan et al., 2019)."""
        return float((self._share() * self._filled(self.confidence * self.gap.clamp(min=0))).sum())

    def _filled(self, values: Tensor) -> Tensor:
        """Zero in empty bins alone: the nan of a classifier that gives nan must not look like a perfect one."""
        return values.masked_fill(self.count == 0, 0)

    def _share(self) -> Tensor:
        return self.count.double() / self.count.sum()


def reliability(probabilities: Tensor, labels: Tensor, bins: int = 15) -> Reliability:
    """Confidence and accuracy by bins of confidence: the bins of `repulsive.metrics.classification.ece`.

    Args:
        probabilities: [N, C], rows that sum to one.
        labels: class of each item [N].
        bins: equal intervals ((b - 1) / bins, b / bins] of the winning probability.

    Raises:
        ValueError: shapes do not fit, there are no items, or fewer than one bin.

    Example:
        >>> p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6]])
        >>> found = reliability(p, torch.tensor([0, 1, 1]), bins=2)
        >>> found.count.tolist(), round(found.ece, 3)
        ([0, 3], 0.1)
    """
    if bins < 1:
        raise ValueError(f"bins={bins}: need at least 1")
    share, hit, sure = binned(probabilities, labels, bins)
    count = (share * len(labels)).round().long()  # [bins]
    empty = count == 0
    edges = torch.arange(bins + 1, dtype=torch.float64, device=share.device) / bins  # [bins + 1]
    return Reliability(
        edges[:-1], edges[1:], sure.masked_fill(empty, torch.nan), hit.masked_fill(empty, torch.nan), count
    )
