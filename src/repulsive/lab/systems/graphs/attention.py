"""Multi-head attention of GraphWriter, dense: every query scores every node, and a mask removes the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GraphSizes:
    """Sizes and choices of the attention.

    Args:
        width: size of a node.
        heads: attention heads in every layer.
        layers: one after the other.
        dropout: on attention weights and on what feed-forward blocks add; never at test, where the released code keeps
            that of the weights.
        detached: no gradient through keys and values to the layers below, as in the released code.
        full_scale: divide scores by the root of the width, as in the released code, not by that of a head's.
        attention: "own" is dense; "pyg" lets PyTorch Geometric attend, see `graph_pyg`: slower, the same numbers.
    """

    width: int = 500
    heads: int = 4
    layers: int = 6
    dropout: float = 0.1
    detached: bool = False
    full_scale: bool = False
    attention: str = "own"

    def __post_init__(self) -> None:
        if min(self.width, self.heads, self.layers) < 1:
            raise ValueError("width, heads and layers must be at least 1")
        if self.width % self.heads:
            raise ValueError(f"width={self.width} does not divide into heads={self.heads}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1")
        if self.attention not in ("own", "pyg"):
            raise ValueError(f"attention={self.attention!r}: choose own or pyg")


class SideBySide(nn.Identity):
    """Where an output projection would be: whoever measures heads, or takes them away, finds them here."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_features = width


class GraphAttention(nn.Module):
    """Multi-head attention without biases and without an output projection: heads side by side are the result."""

    def __init__(self, sizes: GraphSizes) -> None:
        super().__init__()
        self.num_heads, self.dropout = sizes.heads, sizes.dropout
        self.scale = 1 / math.sqrt(sizes.width if sizes.full_scale else sizes.width // sizes.heads)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(sizes.width, sizes.width, bias=False) for _ in range(3))
        self.out = SideBySide(sizes.width)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """[B, Q, width], [B, N, width], bool [B, Q or 1, N] -> [B, Q, width]; every query sees a node at least."""
        return self.attend(x, *self.keys_and_values(memory), mask)

    def keys_and_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """[B, N, width] -> twice [B, M, N, d]."""
        return self._split(self.k_proj(memory)), self._split(self.v_proj(memory))

    def attend(self, x: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """As `forward`, of keys and values that are known.

        Written out: a head of 125 numbers fits no fused kernel, and torch's own fallback scales keys, converts the mask
        and looks for rows that see nothing, all over again at every word.
        """
        scores = (self._split(self.q_proj(x)) * self.scale) @ k.mT  # [B, M, Q, N]
        weights = torch.where(mask.unsqueeze(1), scores, -torch.inf).softmax(-1)
        heads = F.dropout(weights, self.dropout, self.training) @ v  # [B, M, Q, d]
        found: Tensor = self.out(heads.transpose(1, 2).flatten(2))  # [B, Q, width]
        return found

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [B, M, N, d]
