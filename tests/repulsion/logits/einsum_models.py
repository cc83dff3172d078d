"""Float64 models whose weights are bare parameters, and their queries and keys computed by hand."""

import pytest
import torch
from torch import nn

from tests.diagnostics import einsum_models
from tests.diagnostics.einsum_models import Stack
from tests.repulsion.logits.models import Case, ids, padding

SEPARATE = ["W_Q", "b_Q", "W_K"]  # a bias of k has no effect


def project(x, weight, bias=0, axes="med"):
    return torch.einsum(f"bte,{axes}->btmd", x, weight) + bias


def stack(way: str = "einsum") -> Case:
    """Weights [M, D, d] with biases, as in TransformerLens."""
    model = Stack(way)
    inner, x = model.layers[1], einsum_models.X
    return Case(
        model, lambda: model(x), inner,
        lambda x: inner.project(x, inner.W_Q, inner.b_Q), lambda x: inner.project(x, inner.W_K, inner.b_K),
        inner, inner, [0, 1, 2, 3], SEPARATE, "layers.1*", example_inputs=x,
    )  # fmt: skip


def xlnet() -> Case:
    """Weights [D, M, d], tokens before sequences, padding, and a bias in the content term alone."""
    model = einsum_models.xlnet()
    inner, mask = model.layer[1].rel_attn, padding()
    nn.init.normal_(inner.r_w_bias)

    def queries(x):
        return project(x.transpose(0, 1), inner.q, inner.r_w_bias, "emd")

    return Case(
        model, lambda: model(input_ids=ids(40), attention_mask=mask).last_hidden_state, inner,
        queries, lambda x: project(x.transpose(0, 1), inner.k, 0, "emd"),
        inner, inner, [0, 1, 2, 3], ["q", "r_w_bias", "k"], "*layer.1*", mask.bool(), mask.bool(),
    )  # fmt: skip


def lens(**more) -> Case:
    """TransformerLens with rotary positions and two key-value heads."""
    model = einsum_models.hooked(n_key_value_heads=2, positional_embedding_type="rotary", rotary_dim=6, **more)
    inner, mask = model.blocks[1].attn, padding()
    for bias in (inner.b_Q, inner._b_K):
        nn.init.normal_(bias)
    names = ["W_Q", "b_Q", "_W_K"]
    return Case(
        model, lambda: model(ids(40), attention_mask=mask), inner,
        lambda x: project(x, inner.W_Q, inner.b_Q), lambda x: project(x, inner._W_K, inner._b_K),
        _Inputs.inside(inner), _Inputs.inside(inner), [0, 0, 1, 1], names, "blocks.1*", mask.bool(), mask.bool(),
    )  # fmt: skip


class _Inputs(nn.Module):
    """Passes the first keyword argument of an attention module on, so that a hook sees it as a positional argument."""

    @classmethod
    def inside(cls, attention: nn.Module) -> nn.Module:
        inputs = cls()
        attention.register_forward_pre_hook(lambda _, args, kwargs: inputs(kwargs["query_input"]), with_kwargs=True)
        return inputs

    def forward(self, x: torch.Tensor) -> None:
        return None


EINSUM = {
    "einsum": stack,
    "einsum, reshaped": lambda: stack("linear"),
    "einsum, features first": lambda: stack("features first"),
    "xlnet": xlnet,
    "transformer-lens": lens,
}
requires = {"xlnet": "transformers", "transformer-lens": "transformer_lens"}


def build(name: str) -> Case:
    if name in requires:
        pytest.importorskip(requires[name])
    return EINSUM[name]()
