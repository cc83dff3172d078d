"""The graph Transformer of GraphWriter (Koncel-Kedziorski et al., 2019): all graphs of a batch at once.

    mask = adjacency(real, relations)                    # [B, E], [B, R, 3] -> [B, N, N], N = 1 + E + 2 R
    nodes = GraphTransformer(GraphSizes())(nodes, mask)  # [B, N, width] -> same

Nodes are the root, the entities, the relations and their inverses, in this order. A node attends to itself and to its
neighbours: of a relation (a, R, b) with inverse R', a to R, R to b, b to R' and R' to a; root and entities to each
other.
"""

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


class GraphLayer(nn.Module):
    r"""$t = LN(x + A(x)), y = LN'(t + W_2 PReLU(W_1 t))$; the released code has one norm in both places."""

    def __init__(self, sizes: GraphSizes) -> None:
        super().__init__()
        self.detached = sizes.detached
        self.attention = _attention(sizes)
        inner = 4 * sizes.width
        self.feed_forward = nn.Sequential(
            nn.Linear(sizes.width, inner), nn.PReLU(inner), nn.Linear(inner, sizes.width), nn.Dropout(sizes.dropout)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(sizes.width) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        memory = x.detach() if self.detached else x
        t = self.norms[0](x + self.attention(x, memory, mask))  # [B, N, width]
        changed = self.feed_forward(t.flatten(0, 1)).view_as(t)  # PReLU takes its parameters along axis 1
        found: Tensor = self.norms[1](t + changed)
        return found


def _attention(sizes: GraphSizes) -> GraphAttention:
    if sizes.attention == "own":
        return GraphAttention(sizes)
    from repulsive.lab.systems.graphs.encoder_pyg import PygAttention

    return PygAttention(sizes)


class GraphTransformer(nn.Module):
    """Layers one after the other."""

    def __init__(self, sizes: GraphSizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GraphLayer(sizes) for _ in range(sizes.layers))

    def forward(self, nodes: Tensor, mask: Tensor) -> Tensor:
        """[B, N, width], bool [B, N, N] -> [B, N, width]."""
        for layer in self.layers:
            nodes = layer(nodes, mask)
        return nodes

    def weights(self) -> Tensor:
        """Weights of q, k and v of every layer, head by head, [layers, 3, M, D]."""
        found = []
        for attention in (layer.attention for layer in self.layers):
            assert isinstance(attention, GraphAttention)
            some = (attention.q_proj, attention.k_proj, attention.v_proj)
            found.append(torch.stack([x.weight.unflatten(0, (attention.num_heads, -1)).flatten(1) for x in some]))
        return torch.stack(found)


def adjacency(real: Tensor, relations: Tensor, padding: int = 0) -> Tensor:
    """Who attends to whom, bool [B, N, N]; padding attends to itself alone, and nobody to it.

    Args:
        real: which entities there are, bool [B, E].
        relations: head, relation, tail, [B, R, 3]; entities count from 0.
        padding: number of the relation that is none.
    """
    batch, entities, among = *real.shape, relations.shape[1]
    there = (relations[..., 1] != padding).unsqueeze(2)  # [B, R, 1]
    numbers = torch.arange(entities, device=real.device)
    head = (relations[..., 0].unsqueeze(2) == numbers) & there  # [B, R, E]
    tail = (relations[..., 2].unsqueeze(2) == numbers) & there
    size = 1 + entities + 2 * among
    own = torch.eye(size, dtype=torch.bool, device=real.device)
    mask = own.expand(batch, size, size).clone()
    nodes, forth, back = slice(1, 1 + entities), slice(1 + entities, 1 + entities + among), slice(size - among, size)
    mask[:, 0, nodes] = mask[:, nodes, 0] = real
    mask[:, nodes, forth], mask[:, forth, nodes] = head.mT, tail
    mask[:, nodes, back], mask[:, back, nodes] = tail.mT, head
    return mask


def present(real: Tensor, relations: Tensor, padding: int = 0) -> Tensor:
    """Which nodes there are, bool [B, N]; arguments as those of `adjacency`."""
    there = relations[..., 1] != padding  # [B, R]
    return torch.cat([torch.ones_like(real[:, :1]), real, there, there], dim=1)
