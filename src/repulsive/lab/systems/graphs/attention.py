"""Dense multi-head attention for GraphWriter: every query scores every node, and a mask hides non-neighbours."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GraphSizes:
    """Sizes and choices of the graph Transformer.

    Args:
        width: size of a node's vector.
        heads: attention heads in every layer.
        layers: number of layers.
        dropout: dropout probability on attention weights and on outputs of feed-forward blocks, in training only.
            (The released code also drops attention weights at test time.)
        detached: stop gradients through keys and values to the layers below, as in the released code.
        full_scale: divide scores by the root of the width, as in the released code, not by that of the head size.
        attention: "own" is dense; "pyg" uses PyTorch Geometric, see `encoder_pyg`: slower, the same results.
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
    """Identity in place of an output projection; tools that measure or ablate heads find the head outputs there."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_features = width


class GraphAttention(nn.Module):
    """Multi-head attention without biases and without an output projection: heads are concatenated."""

    def __init__(self, sizes: GraphSizes) -> None:
        super().__init__()
        self.num_heads, self.dropout = sizes.heads, sizes.dropout
        self.scale = 1 / math.sqrt(sizes.width if sizes.full_scale else sizes.width // sizes.heads)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(sizes.width, sizes.width, bias=False) for _ in range(3))
        self.out = SideBySide(sizes.width)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Attend from x [B, Q, width] to memory [B, N, width]; the mask [B, Q or 1, N] must not hide all nodes."""
        return self.attend(x, *self.keys_and_values(memory), mask)

    def keys_and_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Project [B, N, width] to keys and values, each [B, M, N, d]."""
        return self._split(self.k_proj(memory)), self._split(self.v_proj(memory))

    def attend(self, x: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Attend as `forward` does, with precomputed keys and values.

        The operations are written out, because fused attention does not support heads of 125 numbers, and torch's
        fallback scales keys, converts the mask and looks for empty rows again at every word.
        """
        scores = (self._split(self.q_proj(x)) * self.scale) @ k.mT  # [B, M, Q, N]
        weights = torch.where(mask.unsqueeze(1), scores, -torch.inf).softmax(-1)
        heads = F.dropout(weights, self.dropout, self.training) @ v  # [B, M, Q, d]
        output: Tensor = self.out(heads.transpose(1, 2).flatten(2))  # [B, Q, width]
        return output

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [B, M, N, d]
