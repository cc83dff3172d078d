"""Calibration of a classifier: reliability diagram, expected calibration error (ECE) and overconfidence error (OE)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from repulsive.metrics.classification import binned


@dataclass(frozen=True, eq=False)
class Reliability:
    """Reliability diagram: one value per confidence bin (lower, upper], float64 [bins] except the counts.

    Args:
        lower: lower edges of the bins.
        upper: upper edges of the bins.
        confidence: mean probability of the predicted class; nan in an empty bin.
        accuracy: share of correct predictions; nan in an empty bin.
        count: number of items, int64.
    """

    lower: Tensor
    upper: Tensor
    confidence: Tensor
    accuracy: Tensor
    count: Tensor

    @property
    def gap(self) -> Tensor:
        """Confidence minus accuracy, [bins]: positive if the classifier is overconfident."""
        return self.confidence - self.accuracy

    @property
    def ece(self) -> float:
        r"""Expected calibration error $\sum_b \frac{|B_b|}{N} |acc_b - conf_b|$ (Guo et al., 2017)."""
        return float((self._share() * self._filled(self.gap).abs()).sum())

    @property
    def oe(self) -> float:
        r"""Overconfidence error $\sum_b \frac{|B_b|}{N} conf_b \max(conf_b - acc_b, 0)$ (Thulasidasan et al., 2019)."""
        return float((self._share() * self._filled(self.confidence * self.gap.clamp(min=0))).sum())

    def _filled(self, values: Tensor) -> Tensor:
        """Set only empty bins to zero; other nan values stay, so that a nan prediction does not look calibrated."""
        return values.masked_fill(self.count == 0, 0)

    def _share(self) -> Tensor:
        return self.count.double() / self.count.sum()


def reliability(probabilities: Tensor, labels: Tensor, bins: int = 15) -> Reliability:
    """Compute mean confidence and accuracy of each confidence bin, with the bins of `metrics.classification.ece`.

    Args:
        probabilities: predicted probabilities [N, C]; rows sum to one.
        labels: class of each item [N].
        bins: number of equal intervals ((b - 1) / bins, b / bins] of confidence.

    Raises:
        ValueError: shapes do not match, there are no items, or bins is below 1.

    Example:
        >>> p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6]])
        >>> diagram = reliability(p, torch.tensor([0, 1, 1]), bins=2)
        >>> diagram.count.tolist(), round(diagram.ece, 3)
        ([0, 3], 0.1)
    """
    if bins < 1:
        raise ValueError(f"bins={bins}: need at least 1")
    share, accuracy, confidence = binned(probabilities, labels, bins)
    count = (share * len(labels)).round().long()  # [bins]
    empty = count == 0
    edges = torch.arange(bins + 1, dtype=torch.float64, device=share.device) / bins  # [bins + 1]
    return Reliability(
        edges[:-1], edges[1:], confidence.masked_fill(empty, torch.nan), accuracy.masked_fill(empty, torch.nan), count
    )
