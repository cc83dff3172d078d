"""Ranks with ties."""

from __future__ import annotations

import torch
from torch import Tensor


def ranks(values: Tensor) -> Tensor:
    """Compute the rank of each value, from 1; ties share their mean rank. If a value is nan, all ranks are nan.

    Example:
        >>> ranks(torch.tensor([3.0, 1.0, 3.0])).tolist()
        [2.5, 1.0, 2.5]
    """
    if bool(values.isnan().any()):
        return torch.full_like(values, torch.nan, dtype=torch.float64)
    _, which, count = values.unique(return_inverse=True, return_counts=True)  # sorted
    last = count.cumsum(0).double()
    return (last - (count - 1) / 2)[which]
