"""The graph Transformer of GraphWriter (Koncel-Kedziorski et al., 2019), over all graphs of a batch at once.

    mask = adjacency(real, relations)                    # [B, E], [B, R, 3] -> [B, N, N], N = 1 + E + 2 R
    nodes = GraphTransformer(GraphSizes())(nodes, mask)  # [B, N, width] -> [B, N, width]

Nodes are the root, the entities, the relations and their inverses, in this order. A node attends to itself and to its
neighbours: of a relation (a, R, b) with inverse R', a to R, R to b, b to R' and R' to a; root and entities to each
other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from repulsive.lab.systems.graphs.attention import GraphAttention, GraphSizes

PADDING = 0  # id of the padding relation


class GraphLayer(nn.Module):
    r"""Layer $t = LN(x + A(x)), y = LN'(t + W_2 PReLU(W_1 t))$; the released code uses one norm for both."""

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
        change = self.feed_forward(t.flatten(0, 1)).view_as(t)  # PReLU has its parameters along axis 1
        output: Tensor = self.norms[1](t + change)
        return output


def _attention(sizes: GraphSizes) -> GraphAttention:
    if sizes.attention == "own":
        return GraphAttention(sizes)
    from repulsive.lab.systems.graphs.encoder_pyg import PygAttention

    return PygAttention(sizes)


class GraphTransformer(nn.Module):
    """A stack of graph attention layers."""

    def __init__(self, sizes: GraphSizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GraphLayer(sizes) for _ in range(sizes.layers))

    def forward(self, nodes: Tensor, mask: Tensor) -> Tensor:
        """Update nodes [B, N, width] under an attention mask, bool [B, N, N]."""
        for layer in self.layers:
            nodes = layer(nodes, mask)
        return nodes

    def weights(self) -> Tensor:
        """Stack the query, key and value weights of every layer and head, [layers, 3, M, D]."""
        layers = []
        for attention in (layer.attention for layer in self.layers):
            assert isinstance(attention, GraphAttention)
            parts = (attention.q_proj, attention.k_proj, attention.v_proj)
            layers.append(torch.stack([x.weight.unflatten(0, (attention.num_heads, -1)).flatten(1) for x in parts]))
        return torch.stack(layers)


def adjacency(real: Tensor, relations: Tensor) -> Tensor:
    """Build the attention mask between nodes, bool [B, N, N]; padding attends only to itself, no node to padding.

    Args:
        real: mask of the entities that exist, bool [B, E].
        relations: head, relation, tail, [B, R, 3]; entities count from 0.
    """
    batch, entities, among = *real.shape, relations.shape[1]
    there = (relations[..., 1] != PADDING).unsqueeze(2)  # [B, R, 1]
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


def present(real: Tensor, relations: Tensor) -> Tensor:
    """Build the mask of the nodes that exist, bool [B, N]; arguments as in `adjacency`."""
    there = relations[..., 1] != PADDING  # [B, R]
    return torch.cat([torch.ones_like(real[:, :1]), real, there, there], dim=1)
