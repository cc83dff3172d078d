"""Similarity of attention logits and OV circuits: against loops over token pairs, and invariances."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from repulsive.diagnostics.circuits import Similarity, circuit_similarity
from repulsive.errors import DivergedError
from tests.diagnostics.circuit_cases import MASK, TEXT, shaken
from tests.heads.zoo import SMALL, build, ids

transformers = pytest.importorskip("transformers")

M, D, WIDTH = 4, 8, 32
PAIR = {**TEXT, "decoder_input_ids": ids(5), "decoder_attention_mask": MASK[:, :5]}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": M, "vocab_size": 64, **_IDS}
T5 = {"d_model": WIDTH, "d_kv": D, "d_ff": 40, "num_layers": 2, "num_heads": M, "vocab_size": 64}


@dataclass
class Weights:
    """Weights [M, d, D], biases [M, d] and output projection [M, D, d] of each head of one class."""

    q: tuple[Tensor, Tensor]
    k: tuple[Tensor, Tensor]
    v: tuple[Tensor, Tensor]
    o: Tensor
    norms: tuple[Any, Any] = (None, None)


def plain(attention: Any, names: tuple[str, str, str], out: nn.Module, kv_heads: int = M) -> Weights:
    """Separate projections with consecutive heads; query head i reads key-value head i // (M / kv_heads)."""
    made = []
    for name, heads in zip(names, (M, kv_heads, kv_heads), strict=True):
        layer = getattr(attention, name)
        bias = torch.zeros(len(layer.weight)) if layer.bias is None else layer.bias
        each = [h * heads // M for h in range(M)]
        made.append((layer.weight.view(heads, D, -1)[each], bias.to(layer.weight).view(heads, D)[each]))
    norms = (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))
    return Weights(*made, out.weight.view(-1, M, D).transpose(0, 1), norms)


def packed(weight: Tensor, bias: Tensor, out: Tensor) -> Weights:
    """All of q, then all of k, then all of v: [3 D, D]."""
    parts = [
        (weight[i * WIDTH : (i + 1) * WIDTH].view(M, D, -1), bias[i * WIDTH : (i + 1) * WIDTH].view(M, D))
        for i in range(3)
    ]
    return Weights(*parts, out.view(-1, M, D).transpose(0, 1))


def interleaved(attention: Any) -> Weights:
    """q, k and v of head 0, then of head 1, as GPT-NeoX has them."""
    layer = attention.query_key_value
    weight, bias = layer.weight.view(M, 3, D, -1), layer.bias.view(M, 3, D)
    parts = [(weight[:, i], bias[:, i]) for i in range(3)]
    return Weights(*parts, attention.dense.weight.view(-1, M, D).transpose(0, 1))


PROJ = ("q_proj", "k_proj", "v_proj")
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": D, "attention_bias": True}
# name -> class, configuration, inputs, the attention module, its weights, masks of queries and keys
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Tensor], str, Any, Tensor, Tensor]] = {
    "bert": (
        "Bert",
        SMALL,
        TEXT,
        "encoder.layer.1.attention.self",
        lambda a, m: plain(a, ("query", "key", "value"), m.encoder.layer[1].attention.output.dense),
        MASK,
        MASK,
    ),
    "gpt2": (
        "GPT2",
        GPT2,
        TEXT,
        "h.1.attn",
        lambda a, m: packed(a.c_attn.weight.T, a.c_attn.bias, a.c_proj.weight.T),
        MASK,
        MASK,
    ),
    "gpt-neox": ("GPTNeoX", {**SMALL, **_IDS}, TEXT, "layers.1.attention", lambda a, m: interleaved(a), MASK, MASK),
    "llama": ("Llama", GROUPED, TEXT, "layers.1.self_attn", lambda a, m: plain(a, PROJ, a.o_proj, 2), MASK, MASK),
    "qwen3": (
        "Qwen3",
        {**GROUPED, **_IDS},
        TEXT,
        "layers.1.self_attn",
        lambda a, m: plain(a, PROJ, a.o_proj, 2),
        MASK,
        MASK,
    ),
    "t5 cross": (
        "T5",
        T5,
        PAIR,
        "decoder.block.1.layer.1.EncDecAttention",
        lambda a, m: plain(a, ("q", "k", "v"), a.o),
        MASK[:, :5],
        MASK,
    ),
    "t5 decoder": (
        "T5",
        T5,
        PAIR,
        "decoder.block.1.layer.0.SelfAttention",
        lambda a, m: plain(a, ("q", "k", "v"), a.o),
        MASK[:, :5],
        MASK[:, :5],
    ),
}


def inputs_of(model: nn.Module, name: str, batch: Any) -> tuple[Tensor, Tensor]:
    """Inputs of the query and key projections of an attention module, [B, T, D]."""
    recorded: list[tuple[Tensor, Tensor]] = []

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        memory = kwargs.get("key_value_states")
        recorded.append((x, x if memory is None else memory))

    handle = model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
    with torch.no_grad():
        model(**batch)
    handle.remove()
    return recorded[0]


@torch.no_grad()
def oracle(weights: Weights, x: Tensor, y: Tensor, real_x: Tensor, real_y: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines of logits and of OV circuits, one pair of tokens at a time."""

    def head(part: tuple[Tensor, Tensor], token: Tensor, norm: Any = None) -> Tensor:
        made = torch.stack([part[0][i] @ token + part[1][i] for i in range(M)])
        return made if norm is None else norm(made)

    queries = [
        head(weights.q, x[b, t], weights.norms[0]) for b in range(len(x)) for t in range(x.shape[1]) if real_x[b, t]
    ]
    keys, values = [], []
    for b in range(len(y)):
        mine = [y[b, t] for t in range(y.shape[1]) if real_y[b, t]]
        made = [head(weights.k, token, weights.norms[1]) for token in mine]
        keys += [key - sum(made) / len(made) for key in made]
        values += [torch.stack([weights.o[i] @ head(weights.v, token)[i] for i in range(M)]) for token in mine]
    logits, ov = torch.zeros(2, M, M, dtype=torch.float64)
    for q in queries:
        for k in keys:
            f = torch.stack([q[i] @ k[i] for i in range(M)])
            logits += torch.outer(f, f)
    for g in values:
        ov += g @ g.T
    return tuple(p / torch.outer(p.diagonal(), p.diagonal()).sqrt() for p in (logits, ov))


def close(found: Tensor, wanted: Tensor) -> bool:
    return float((found - wanted).abs().max() / wanted.abs().max()) <= 1e-10


@pytest.mark.parametrize("case", CASES)
def test_cosines_equal_a_double_loop_over_tokens(case):
    kind, config, batch, name, weights, real_x, real_y = CASES[case]
    torch.manual_seed(0)
    model = shaken(getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**config)))
    found = circuit_similarity(model, [batch])
    assert not found.left_out
    logits, ov = oracle(weights(model.get_submodule(name), model), *inputs_of(model, name, batch), real_x, real_y)
    assert close(next(s.cosine for s in found.logits if s.name == name), logits)
    assert close(next(s.cosine for s in found.ov if s.name == name), ov)


@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_attention_equals_explicit_projections(batch_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, M, 40, batch_first=batch_first)
    model = shaken(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    given = x if batch_first else x.transpose(0, 1)
    found = circuit_similarity(model, [{"src": given, "src_key_padding_mask": MASK == 0}])
    attention = model.layers[0].self_attn
    weights = packed(attention.in_proj_weight, attention.in_proj_bias, attention.out_proj.weight)
    logits, ov = oracle(weights, x, x, MASK, MASK)
    assert close(found.logits[0].cosine, logits) and close(found.ov[0].cosine, ov)


def test_masks_can_leave_out_tokens():
    first = MASK.clone()
    first[:, 0] = 0  # without the first token of each sentence
    model = shaken(build("bert, sdpa")[0])
    name = "encoder.layer.1.attention.self"
    weights = plain(model.get_submodule(name), ("query", "key", "value"), model.encoder.layer[1].attention.output.dense)
    found = circuit_similarity(model, [TEXT], queries=lambda *_: MASK.bool(), keys=lambda *_: first.bool())
    logits, ov = oracle(weights, *inputs_of(model, name, TEXT), MASK, first)
    assert close(found.logits[1].cosine, logits) and close(found.ov[1].cosine, ov)
    attention = shaken(nn.MultiheadAttention(WIDTH, M, batch_first=True))
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    call = {"query": x, "key": x, "value": x, "key_padding_mask": MASK == 0}
    found = circuit_similarity(attention, [call], keys=lambda *_: first.bool())
    packed_weights = packed(attention.in_proj_weight, attention.in_proj_bias, attention.out_proj.weight)
    assert close(found.logits[0].cosine, oracle(packed_weights, x, x, MASK, first)[0])


def test_an_invertible_matrix_between_q_and_k_changes_only_weights():
    model = shaken(build("bert, sdpa")[0])
    before = circuit_similarity(model, [TEXT])
    attention = model.encoder.layer[0].attention.self
    turn = torch.randn(D, D, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    query, key = (layer.weight.detach()[D : 2 * D].clone() for layer in (attention.query, attention.key))
    with torch.no_grad():  # head 1
        for layer, matrix in ((attention.query, turn), (attention.key, torch.linalg.inv(turn).T)):
            layer.weight[D : 2 * D] = matrix @ layer.weight[D : 2 * D]
            layer.bias[D : 2 * D] = matrix @ layer.bias[D : 2 * D]
    assert not torch.allclose(attention.query.weight[D : 2 * D], query, atol=0.1)
    assert not torch.allclose(attention.key.weight[D : 2 * D], key, atol=0.1)
    after = circuit_similarity(model, [TEXT])
    for a, b in zip(before.logits, after.logits, strict=True):
        torch.testing.assert_close(a.cosine, b.cosine, rtol=1e-9, atol=1e-9)


def test_permuting_heads_permutes_the_matrix():
    model = shaken(build("bert, sdpa")[0])
    before = circuit_similarity(model, [TEXT])
    order = torch.tensor([2, 0, 3, 1])
    rows = (order[:, None] * D + torch.arange(D)).flatten()
    attention = model.encoder.layer[0].attention
    with torch.no_grad():
        for layer in (attention.self.query, attention.self.key, attention.self.value):
            layer.weight.copy_(layer.weight[rows].clone()), layer.bias.copy_(layer.bias[rows].clone())
        attention.output.dense.weight.copy_(attention.output.dense.weight[:, rows].clone())
    after = circuit_similarity(model, [TEXT])
    for circuit in ("logits", "ov"):
        a, b = getattr(before, circuit)[0].cosine, getattr(after, circuit)[0].cosine
        torch.testing.assert_close(a[order][:, order], b)
    torch.testing.assert_close(before.logits[1].cosine, after.logits[1].cosine)  # the model computes the same


def test_two_pairs_of_duplicates_have_a_low_mean_and_largest_cosine_one():
    model = shaken(build("bert, sdpa")[0])
    attention = model.encoder.layer[0].attention.self
    with torch.no_grad():
        for layer, signs in ((attention.query, (1, 1, -1, -1)), (attention.key, (1, 1, 1, 1))):
            for tensor in (layer.weight, layer.bias):
                tensor.copy_(torch.cat([sign * tensor[:D].clone() for sign in signs]))
    found = circuit_similarity(model, [TEXT]).logits[0]
    assert found.mean == pytest.approx(-1 / 3) and found.largest == pytest.approx(1)
    assert found.pair[1:3] in ((0, 1), (2, 3)) and found.pair.cosine == found.largest


def test_the_token_sample_is_limited_and_reproducible():
    model = build("bert, sdpa")[0]
    batches = [TEXT, {"input_ids": ids(7).flip(0)}]
    found = [circuit_similarity(model, batches, tokens=9, seed=seed) for seed in (0, 0, 1)]
    assert found[0].logits[0].tokens == found[0].ov[1].tokens == 9
    assert torch.equal(found[0].logits[1].cosine, found[1].logits[1].cosine)
    assert not torch.equal(found[0].logits[1].cosine, found[2].logits[1].cosine)
    assert circuit_similarity(model, batches).logits[0].tokens == 11 + 14
    with pytest.raises(ValueError, match="at least one"):
        circuit_similarity(model, [])


def test_the_model_does_not_change_and_nan_is_refused():
    model = build("bert, sdpa")[0].train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    circuit_similarity(model, [TEXT])
    assert model.training and all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with torch.no_grad():
        model.encoder.layer[0].attention.self.key.bias[0] = torch.nan
    with pytest.raises(DivergedError, match="earlier checkpoint"):
        circuit_similarity(model, [TEXT])


def test_one_head_has_no_pair():
    alone = Similarity("layer", "logits", torch.ones(1, 1, dtype=torch.float64), 3)
    assert alone.pair is None and alone.mean != alone.mean
