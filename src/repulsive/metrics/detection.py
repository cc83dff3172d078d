"""How well something is told from its absence, whatever the threshold."""

from __future__ import annotations

from torch import Tensor

from repulsive.metrics.correlation import ranks


def auc(scores: Tensor, labels: Tensor) -> float:
    r"""Area under the ROC curve: $P(s_+ > s_-) + P(s_+ = s_-) / 2$ for a positive and a negative item at random.

    Args:
        scores: higher for what is likelier to be positive, [N].
        labels: bool [N].

    Returns:
        From 0 to 1, 0.5 for guessing; nan where all labels are equal or a score is nan.

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
