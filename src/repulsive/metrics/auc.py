"""Area under the ROC curve."""

from __future__ import annotations

from torch import Tensor

from repulsive.metrics.ranks import ranks


def auc(scores: Tensor, labels: Tensor) -> float:
    r"""Area under the ROC curve: $P(s_+ > s_-) + P(s_+ = s_-) / 2$ for a random positive and negative item.

    Args:
        scores: [N], higher for items that are more likely positive.
        labels: bool [N].

    Returns:
        A number from 0 to 1, 0.5 for random scores; nan if all labels are equal or a score is nan.

    Example:
        >>> import torch
        >>> auc(torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([False, False, True, True]))
        0.875
    """
    labels = labels.bool()
    positive, negative = int(labels.sum()), int((~labels).sum())
    if not positive or not negative:
        return float("nan")
    above = ranks(scores.double())[labels].sum() - positive * (positive + 1) / 2
    return float(above / positive / negative)
