"""Graph attention with `TransformerConv` of PyTorch Geometric, edge by edge, as an independent implementation.

    GraphTransformer(GraphSizes(attention="pyg"))

Parameter names are those of `GraphAttention`, so checkpoints fit both.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor

from repulsive.errors import ConfigError
from repulsive.extras import install_command
from repulsive.lab.systems.graphs.attention import GraphAttention, GraphSizes


class PygAttention(GraphAttention):
    """`GraphAttention` whose `forward` uses `TransformerConv` along the edges of a mask.

    Raises:
        ConfigError: torch-geometric is not installed.
    """

    def __init__(self, sizes: GraphSizes) -> None:
        super().__init__(sizes)
        self._own_scale = sqrt(sizes.width // sizes.heads)  # TransformerConv divides scores by it
        with torch.random.fork_rng(devices=[]):  # the initial weights of TransformerConv are replaced below
            conv = _transformer_conv()(
                sizes.width,
                sizes.width // sizes.heads,
                sizes.heads,
                dropout=sizes.dropout,
                bias=False,
                root_weight=False,
            )
        conv.lin_query, conv.lin_key, conv.lin_value = self.q_proj, self.k_proj, self.v_proj
        self._conv = (conv,)  # a module in a tuple is not registered, so that each parameter has one name

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Attend as `GraphAttention.forward` does; counting the edges synchronises with the device."""
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ConfigError('model.attention="pyg" counts edges and cannot be captured: set training.capture=false')
        batch, queries, nodes = mask.expand(-1, x.shape[1], -1).nonzero(as_tuple=True)  # one entry per edge
        edges = torch.stack([batch * memory.shape[1] + nodes, batch * x.shape[1] + queries])
        (conv,) = self._conv
        scaled = x.flatten(0, 1) * (self.scale * self._own_scale)
        heads = conv.train(self.training)((memory.flatten(0, 1), scaled), edges)  # [B Q, width]
        output: Tensor = self.out(heads.view_as(x))
        return output


def _transformer_conv() -> Any:
    try:
        from torch_geometric.nn import TransformerConv
    except ImportError:
        raise ConfigError(
            f'model.attention="pyg" needs torch-geometric: {install_command("pyg")}, or set model.attention="own"'
        ) from None
    return TransformerConv
