"""Overlap of attention weights between heads."""

from __future__ import annotations

import torch
from torch import Tensor


def head_overlap(attention: Tensor) -> Tensor:
    r"""Compute $\sum_t \min(a_{it}, a_{jt})$ for each pair of heads.

    Args:
        attention: attention weights [..., M, T]; the weights of each head sum to one.

    Returns:
        [..., M, M]: 1 for heads with the same attention, 0 for heads that share no token.
    """
    rows = attention.unbind(-2)  # one head at a time: [..., M, M, T] would be large
    return torch.stack([torch.minimum(row.unsqueeze(-2), attention).sum(-1) for row in rows], -2)
