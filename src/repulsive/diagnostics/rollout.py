r"""Attention rollout (Abnar and Zuidema, 2020): how much each token of the last layer depends on each input token.

With the mean $\bar A_l$ over the heads of layer l, and the identity for the residual connection,

$$R = \prod_{l = L}^{1} \tfrac12 (\bar A_l + I).$$

Rows sum to 1. Rollout ignores values, feed-forward layers and the size of the residual stream: it is a summary of the
attention, not an explanation of the output.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def attention_rollout(layers: Sequence[Tensor]) -> Tensor:
    """Multiply the attention of all layers, each averaged with the identity.

    Args:
        layers: attention weights [..., M, T, T], the first layer first.

    Returns:
        float64 [..., T, T]: row t is the share of each input token in token t of the last layer.

    Example:
        >>> attention_rollout([torch.eye(2).expand(3, 2, 2)]).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    if not layers:
        raise ValueError("attention rollout needs at least one layer")
    result = torch.eye(layers[0].shape[-1], dtype=torch.float64, device=layers[0].device)
    for weights in layers:
        mean = weights.double().mean(-3)  # [..., T, T]
        result = 0.5 * (mean @ result + result)
    return result
