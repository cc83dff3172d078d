"""A mean over what counts."""

import torch
from torch import Tensor


def mean_of(x: Tensor, counts: Tensor | None) -> Tensor:
    """Mean of the entries that count, 0 where none does; a sum and a count, as a selection would wait for the device.

    Args:
        x: any shape.
        counts: bool of the same shape; None: all.
    """
    if counts is None:
        return x.mean()
    return torch.where(counts, x, 0).sum() / counts.sum().clamp(min=1)
