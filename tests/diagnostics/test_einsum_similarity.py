"""Similarity of heads, inspection and monitoring of models whose weights are bare parameters."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from repulsive import HeadMonitor, Heads
from repulsive.diagnostics.circuits import circuit_similarity
from repulsive.diagnostics.head_selection import select_heads
from repulsive.diagnostics.inspection import inspect_heads
from repulsive.diagnostics.untrained_twin import untrained_twin
from repulsive.errors import HeadLayoutError, SelectionError
from repulsive.heads import find_heads
from tests.diagnostics.einsum_models import TOKENS, WAYS, M, Stack, X, hooked, xlnet

pytestmark = pytest.mark.filterwarnings("ignore:HookedTransformer is deprecated")


def oracle(queries, keys):
    """Cosines between the logits of heads, from every pair of tokens; both are [B, T, M, d]."""
    keys = keys - keys.mean(1, keepdim=True)
    queries, keys = queries.flatten(0, 1), keys.flatten(0, 1)
    logits = torch.stack([torch.stack([(q * k).sum(-1) for k in keys]) for q in queries]).flatten(0, 1)  # [N N, M]
    return torch.nn.functional.normalize(logits.T, dim=-1) @ torch.nn.functional.normalize(logits.T, dim=-1).T


@pytest.mark.parametrize("way", ["einsum", "linear"])
def test_cosines_of_logits_and_ov_circuits(way):
    model = Stack(way)
    layer = model.layers[0]
    result = circuit_similarity(model, [X], groups=find_heads(model, X), out={"layers.0": "layers.0.W_O"})
    q, k, v = (
        torch.einsum("bte,med->btmd", X, weight) + bias
        for weight, bias in ((layer.W_Q, layer.b_Q), (layer.W_K, layer.b_K), (layer.W_V, layer.b_V))
    )
    torch.testing.assert_close(result.logits[0].cosine, oracle(q, k).detach(), rtol=1e-10, atol=1e-10)
    writes = nn.functional.normalize(torch.einsum("btmd,mde->mbte", v, layer.W_O).flatten(1), dim=-1)
    torch.testing.assert_close(result.ov[0].cosine, (writes @ writes.T).detach(), rtol=1e-10, atol=1e-10)


def test_logits_of_xlnet_have_its_content_bias_and_no_positions():
    model = xlnet().eval()
    attention = model.layer[0].rel_attn
    nn.init.normal_(attention.r_w_bias)
    result = circuit_similarity(model, [TOKENS])
    h = model.word_embedding(TOKENS)  # [B, T, D]
    q = torch.einsum("bth,hnd->btnd", h, attention.q) + attention.r_w_bias
    k = torch.einsum("bth,hnd->btnd", h, attention.k)
    torch.testing.assert_close(result.logits[0].cosine, oracle(q, k).detach(), rtol=1e-10, atol=1e-10)
    assert not result.left_out and len(result.ov) == 2


def test_logits_of_transformer_lens():
    model = hooked(use_qk_norm=True, positional_embedding_type="rotary", rotary_dim=6).eval()
    _, cache = model.run_with_cache(TOKENS)
    attention = model.blocks[0].attn
    q, k = (
        norm(cache[f"blocks.0.attn.hook_{part}"]) for part, norm in (("q", attention.q_norm), ("k", attention.k_norm))
    )
    result = circuit_similarity(model, [TOKENS])
    torch.testing.assert_close(result.logits[0].cosine, oracle(q, k).detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("build", [lambda: Stack(), xlnet, hooked], ids=["einsum", "xlnet", "transformer-lens"])
def test_an_inspection_is_complete(build):
    model = build()
    inputs = X if isinstance(model, Stack) else TOKENS
    result = inspect_heads(model, [inputs], ablation=True, twins=2)
    assert [heads for *_, heads in result.layers] == [M, M]
    assert result.importance is not None and result.ablation is not None and len(result.circuits.ov) == 2
    notes = [note for note in result.notes if "kinds of heads" not in note]
    assert not notes if not isinstance(model, Stack) else [("untrained twin" in note) for note in notes] == [True]


def test_twins_of_transformer_lens_have_new_weights():
    model = hooked()
    state = torch.random.get_rng_state()
    first, second = untrained_twin(model, 0), untrained_twin(model, 1)
    assert torch.equal(torch.random.get_rng_state(), state)
    weights = [each.blocks[0].attn.W_Q for each in (model, first, second)]
    assert not any(torch.equal(a, b) for a, b in ((weights[0], weights[1]), (weights[1], weights[2])))
    assert 0.5 < float((first.W_Q.std() / model.W_Q.std()).detach()) < 2


@pytest.mark.parametrize("build", [lambda: Stack(), xlnet, hooked], ids=["einsum", "xlnet", "transformer-lens"])
def test_a_monitor_measures_training_passes_without_changing_them(build):
    model = build()
    inputs = X if isinstance(model, Stack) else TOKENS

    def loss():
        result = model(inputs)
        return (result if isinstance(result, torch.Tensor) else result[0]).square().sum()

    loss().backward()
    expected = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with HeadMonitor(model, every=1, example_inputs=inputs) as monitor:
        loss().backward()
        monitor.step()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert gradient is None or torch.equal(parameter.grad, gradient)
    layers = monitor.history[0].layers
    assert [len(layer.entropy) for layer in layers] == [len(layer.written) for layer in layers] == [M, M]
    similarity = circuit_similarity(model, [inputs], groups=find_heads(model, inputs)).logits
    for layer, expected_layer in zip(layers, similarity, strict=True):
        torch.testing.assert_close(torch.tensor(layer.cosine), expected_layer.cosine.float(), rtol=1e-4, atol=1e-4)


class Checkpointed(Stack):
    def forward(self, x):
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("way", WAYS)
def test_a_monitor_measures_passes_under_activation_checkpointing(way):
    model = Checkpointed(way)
    with HeadMonitor(model, every=1, example_inputs=X) as monitor:
        model(X).sum().backward()
        monitor.step()
    assert [len(layer.written) for layer in monitor.history[0].layers] == [M, M]


class Bare(nn.Module):
    """Attention whose packed weight is a matrix, but not that of a module."""

    def __init__(self):
        super().__init__()
        width = X.shape[-1]
        self.mix = nn.Parameter(torch.randn(3 * width, width, dtype=X.dtype) / width**0.5)
        self.merge = nn.Linear(width, width, dtype=X.dtype)

    def forward(self, x):
        q, k, v = nn.functional.linear(x, self.mix).unflatten(-1, (3, M, -1)).permute(2, 0, 3, 1, 4)
        return self.merge(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_refusals_say_what_to_do():
    torch.manual_seed(0)
    model = nn.Sequential(Bare())
    with pytest.raises(HeadLayoutError, match=r"0\.mix is a parameter .* or compare heads in 'attention', 'outputs'"):
        circuit_similarity(model, [X])
    assert len(Heads(model, X).similarity([X], "attention", twins=0)) == 1
    with pytest.raises(SelectionError, match=r"W_Q has separate axes for heads and features: use layout='heads'"):
        find_heads(Stack("einsum"), X, layout="strided")
    with pytest.raises(SelectionError, match=r"accepts no smaller number of heads .* any heads can be ablated"):
        select_heads(Heads(xlnet().eval()), torch.ones(2, M), keep=0.5)
