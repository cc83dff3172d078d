"""Attention in einsum notation: weights are bare parameters with one axis for heads and one for features."""

import pytest
import torch
from torch import nn

M, E, D = 4, 24, 6  # heads, width of the model, width of a head


class Lens(nn.Module):
    """The structure of TransformerLens: W_Q [M, E, d] and W_O [M, d, E], with biases for each head.

    Args:
        way: how products are computed: "einsum"; "linear" with reshaped copies of the weights; "result", which
            multiplies element by element; "joined", one einsum for attention weights, values and output weight; or
            "features first", with weights [M, d, E] of q, k and v.
    """

    def __init__(self, way="einsum", dtype=torch.float64):
        super().__init__()
        self.way, generator = way, torch.Generator().manual_seed(0)

        def weight(*shape):
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=dtype) / 3)

        self.W_Q, self.W_K, self.W_V = (weight(M, E, D) for _ in range(3))
        self.b_Q, self.b_K, self.b_V = (weight(M, D) for _ in range(3))
        self.W_O, self.b_O = weight(M, D, E), weight(E)
        if way == "features first":
            for name in ("W_Q", "W_K", "W_V"):
                setattr(self, name, nn.Parameter(getattr(self, name).detach().mT.contiguous()))

    def project(self, x, weight, bias):
        if self.way == "linear":
            flat = weight.permute(0, 2, 1).reshape(M * D, E)
            return nn.functional.linear(x, flat, bias.flatten()).unflatten(-1, (M, D))
        return torch.einsum("bte,mde->btmd" if self.way == "features first" else "bte,med->btmd", x, weight) + bias

    def forward(self, x):
        q, k, v = (
            self.project(x, weight, bias)
            for weight, bias in ((self.W_Q, self.b_Q), (self.W_K, self.b_K), (self.W_V, self.b_V))
        )  # [B, T, M, d]
        weights = torch.einsum("btmd,bsmd->bmts", q, k).softmax(-1)
        if self.way == "joined":
            return torch.einsum("bmts,bsmd,mde->bte", weights, v, self.W_O) + self.b_O
        z = torch.einsum("bmts,bsmd->btmd", weights, v)
        if self.way == "linear":
            out = self.W_O.permute(2, 0, 1).reshape(E, M * D).contiguous()
            return nn.functional.linear(z.flatten(2), out, self.b_O)
        if self.way == "result":
            return (z.unsqueeze(-1) * self.W_O).sum(-2).sum(-2) + self.b_O
        return torch.einsum("btmd,mde->bte", z, self.W_O) + self.b_O


class Stack(nn.Module):
    """Two residual layers of attention in einsum notation."""

    def __init__(self, way="einsum", dtype=torch.float64):
        super().__init__()
        self.layers = nn.ModuleList([Lens(way, dtype), Lens(way, dtype)])
        with torch.no_grad():
            self.layers[1].W_V.mul_(-0.7)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


WAYS = ("einsum", "linear", "result", "joined", "features first")
X = torch.randn(2, 5, E, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TOKENS = torch.randint(40, (2, 7), generator=torch.Generator().manual_seed(0))


def xlnet():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.XLNetConfig(vocab_size=40, d_model=24, n_layer=2, n_head=4, d_inner=32, dropout=0.0)
    model = transformers.XLNetModel(config).double()
    for parameter in model.parameters():  # wider weights than at initialisation: heads differ clearly
        if parameter.ndim == 3:
            nn.init.normal_(parameter, std=0.4)
    return model


def hooked(**more):
    lens = pytest.importorskip("transformer_lens")
    try:
        from transformer_lens import HookedTransformer
    except ImportError:
        pytest.skip("TransformerLens 4 has no HookedTransformer")
    config = lens.HookedTransformerConfig(
        n_layers=2, d_model=24, n_ctx=16, d_head=6, n_heads=4, d_vocab=40, d_mlp=32, act_fn="gelu", seed=0,
        dtype=torch.float64, **more,
    )  # fmt: skip
    model = HookedTransformer(config)
    for block in model.blocks:
        nn.init.normal_(block.attn.b_O)
        nn.init.normal_(block.attn._b_V if hasattr(block.attn, "_b_V") else block.attn.b_V)
    return model
