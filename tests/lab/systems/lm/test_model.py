"""The decoder against a naive one in float64, and what must hold for any causal model with rotary positions."""

import dataclasses
import math

import pytest
import torch

from repulsive import SVGD, find_heads, repel, verify_heads
from repulsive.lab.systems.lm.model import CausalAttention, Decoder, DecoderConfig, rotary_angles, rotate

SMALL = DecoderConfig(vocabulary=11, layers=2, width=24, heads=4, length=16)
GROUPED = dataclasses.replace(SMALL, kv_heads=2)
NORMED = dataclasses.replace(SMALL, qk_norm=True)
ALL = [SMALL, GROUPED, NORMED, dataclasses.replace(GROUPED, qk_norm=True), dataclasses.replace(SMALL, kv_heads=1)]


def make(config, seed=0):
    """A model whose norms have weights of their own, so that leaving one out is noticed."""
    torch.manual_seed(seed)
    model = Decoder(config).double().eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    return model


def tokens_of(config, seed=1, batch=2, length=9):
    return torch.randint(config.vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def rms(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x, place):
    """One vector at one place, pair by pair: features i and i + d/2 are a complex number."""
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        angle = place * 10_000 ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i] * math.sin(angle) + x[i + half] * math.cos(angle)
    return out


def naive_attention(own, x, config):
    """[T, width] -> [T, width]: head by head, query by query, key by key."""
    size, served = config.head_width, config.heads // config.num_kv_heads
    q, k, v = ((x @ own[f"{name}_proj.weight"].T).unflatten(-1, (-1, size)) for name in "qkv")  # [T, M or K, d]
    if config.qk_norm:
        q, k = rms(q, own["q_norm.weight"]), rms(k, own["k_norm.weight"])
    heads = torch.zeros_like(q)
    for head in range(config.heads):
        kv = head // served
        for t in range(len(x)):
            query = turned(q[t, head], t)
            scores = torch.stack([query @ turned(k[s, kv], s) / math.sqrt(size) for s in range(t + 1)])
            weights = scores.exp() / scores.exp().sum()
            heads[t, head] = torch.einsum("s,sd->d", weights, v[: t + 1, kv])
    return heads.flatten(1) @ own["o_proj.weight"].T


def naive(model, tokens):
    """[T] -> [T, V]."""
    state, config = model.state_dict(), model.config
    x = state["embedding.weight"][tokens]
    for layer in range(config.layers):
        own = {k.removeprefix(f"layers.{layer}."): w for k, w in state.items() if k.startswith(f"layers.{layer}.")}
        attention = {k.removeprefix("attention."): w for k, w in own.items()}
        x = x + naive_attention(attention, rms(x, own["attention_norm.weight"]), config)
        y = rms(x, own["feed_forward_norm.weight"])
        gate = y @ own["feed_forward.gate.weight"].T
        x = x + (gate / (1 + (-gate).exp()) * (y @ own["feed_forward.up.weight"].T)) @ own["feed_forward.down.weight"].T
    return rms(x, state["norm.weight"]) @ state["embedding.weight"].T


@pytest.mark.parametrize("config", ALL, ids=lambda c: f"kv={c.num_kv_heads},norm={c.qk_norm}")
def test_logits_equal_the_naive_ones(config):
    model, tokens = make(config), tokens_of(config)
    expected = torch.stack([naive(model, row) for row in tokens])
    assert torch.allclose(model(tokens), expected, atol=1e-5, rtol=1e-5)  # angles are stored in float32


@pytest.mark.parametrize("config", ALL, ids=lambda c: f"kv={c.num_kv_heads},norm={c.qk_norm}")
def test_a_later_token_changes_no_earlier_logits(config):
    model, tokens = make(config), tokens_of(config)
    for place in (1, 5, 8):
        other = tokens.clone()
        other[:, place] = (other[:, place] + 1) % config.vocabulary
        same = (model(tokens) - model(other)).abs().amax((0, 2)) < 1e-12  # [T]
        assert same[:place].all() and not same[place:].any()


def test_inner_products_depend_on_the_distance_of_positions_alone():
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    angles = rotary_angles(40, 8).double()
    products = (rotate(q.expand(1, 1, 40, 8), angles) @ rotate(k.expand(1, 1, 40, 8), angles).mT)[0, 0]  # [40, 40]
    for distance in (0, 3, 17):
        along = products.diagonal(-distance)
        assert torch.allclose(along, along[:1].expand_as(along), atol=1e-5)
    assert products.diagonal(-3)[0] != pytest.approx(float(products.diagonal(3)[0]), abs=1e-3)  # order counts
    assert torch.allclose(rotate(q, angles[7:8]).norm(), q.norm())


def test_grouped_heads_equal_repeated_heads():
    grouped = make(GROUPED)
    repeated = Decoder(SMALL).double().eval()
    state = grouped.state_dict()
    for name in [name for name in state if name.endswith(("k_proj.weight", "v_proj.weight"))]:
        state[name] = state[name].unflatten(0, (2, -1)).repeat_interleave(2, 0).flatten(0, 1)
    repeated.load_state_dict(state)
    assert torch.allclose(grouped(tokens_of(SMALL)), repeated(tokens_of(SMALL)), atol=1e-12)


@pytest.mark.parametrize("config", ALL, ids=lambda c: f"kv={c.num_kv_heads},norm={c.qk_norm}")
def test_its_heads_are_proved(config):
    torch.manual_seed(0)
    model, tokens = Decoder(config), tokens_of(config)
    groups = find_heads(model, tokens)
    found = [(g.part, g.num_heads, g.where) for g in groups]
    kv = config.num_kv_heads
    assert found == [("q", 4, "decoder"), ("k", kv, "decoder"), ("v", kv, "decoder")] * config.layers
    assert {report.status for report in verify_heads(model, tokens, groups)} == {"verified"}


def test_repulsion_changes_gradients_of_heads_alone():
    model = make(SMALL).float().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    repel(model, optimizer, SVGD(), verbose=False)
    model(tokens_of(SMALL)).square().mean().backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p.grad, before[name])}
    assert changed == {f"layers.{i}.attention.{part}_proj.weight" for i in (0, 1) for part in "qkv"}


def test_dropped_heads_are_whole_and_the_mean_stays():
    torch.manual_seed(0)
    attention = CausalAttention(dataclasses.replace(SMALL, drop_heads=0.25)).train()
    attention.o_proj = torch.nn.Identity()
    x, angles = torch.randn(1, 5, 24).expand(4000, 5, 24), rotary_angles(5, 6)
    with torch.no_grad():
        seen = attention(x, angles).unflatten(-1, (4, 6))  # [B, T, M, d]
        whole = attention.eval()(x[:1], angles).unflatten(-1, (4, 6))
    kept = (seen != 0).any(3)  # [B, T, M]
    assert torch.equal(kept.all(1), kept.any(1))  # a head is there for all tokens of a sequence, or for none
    assert kept.any(1).double().mean() == pytest.approx(0.75, abs=0.02)  # 16,000 draws: 6 standard deviations
    first = kept.any(1)[:, 0]
    assert torch.allclose(seen[first][0, :, 0], whole[0, :, 0] / 0.75, atol=1e-6)


def test_sizes_and_initial_weights():
    config = DecoderConfig(vocabulary=256)
    assert (config.hidden, config.head_width) == (1376, 64)
    assert DecoderConfig(8, width=96, heads=4).hidden == 256  # 8/3 of 96, and no more
    torch.manual_seed(0)
    model = Decoder(dataclasses.replace(config, layers=2, width=128))
    weights = {name: float(p.detach().std()) for name, p in model.named_parameters() if p.ndim > 1}
    assert not [name for name, _ in model.named_parameters() if "bias" in name]
    for name, std in weights.items():
        last = name.endswith(("o_proj.weight", "down.weight"))
        assert std == pytest.approx(0.04 / (2 if last else 1), rel=0.03), name


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"heads": 5}, "does not divide into heads"),
        ({"heads": 8}, "must be even"),
        ({"kv_heads": 3}, "does not divide into kv_heads"),
        ({"drop_heads": 1.0}, "below 1"),
        ({"layers": 0}, "at least 1"),
    ],
)
def test_sizes_that_cannot_be(wrong, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **wrong)


def test_a_sequence_that_is_too_long():
    with pytest.raises(ValueError, match="17 tokens: the model reads at most 16"):
        Decoder(SMALL)(torch.zeros(1, 17, dtype=torch.long))
