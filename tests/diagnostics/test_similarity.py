"""Similarity of heads: against explicit loops over pairs, in extreme cases, and under permutation."""

import math

import pytest
import torch

from repulsive.diagnostics.hooks.capture import capture
from repulsive.diagnostics.similarity import effective_number, merged, of_attention, of_outputs, of_weights
from repulsive.errors import DivergedError
from repulsive.heads import find_heads
from tests.heads.zoo import build


def brute_force(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean distance and cosine of each pair of heads over positions [P, M, E], by explicit loops."""
    positions, heads, _ = x.shape
    distance, cosine = torch.zeros(2, heads, heads, dtype=torch.float64)
    for p in range(positions):
        for i in range(heads):
            for j in range(heads):
                a, b = x[p, i].double(), x[p, j].double()
                distance[i, j] += math.dist(a.tolist(), b.tolist()) / positions
                cosine[i, j] += torch.dot(a, b) / (a.square().sum().sqrt() * b.square().sum().sqrt()) / positions
    return distance, cosine


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("measure", "is_attention"), [(of_attention, True), (of_outputs, False)])
def test_attention_and_outputs_are_means_over_positions(measure, is_attention):
    x = noise(2, 3, 4, 5)  # [B, M, T, E]
    x = x.softmax(-1) if is_attention else x
    found = measure(x, name="layer 0")
    distance, cosine = brute_force(x.transpose(1, 2).flatten(0, 1))
    torch.testing.assert_close(found.distance, distance)
    torch.testing.assert_close(found.cosine, cosine)
    pairs = [(0, 1), (0, 2), (1, 2)]
    assert found.mean_cosine == pytest.approx(sum(float(cosine[p]) for p in pairs) / 3)
    assert found.mean_distance == pytest.approx(sum(float(distance[p]) for p in pairs) / 3)
    best = max(pairs, key=lambda p: float(cosine[p]))
    assert found.closest(1)[0][:3] == ("layer 0", *best)


def test_weights_of_a_real_model_are_measured_group_by_group():
    model, _ = build("llama, sdpa")
    groups = find_heads(model)
    found = of_weights(groups)
    assert [(d.name, d.num_heads) for d in found] == [(g.name, g.num_heads) for g in groups]
    query = model.layers[1].self_attn.q_proj.weight.view(1, 4, -1)  # [1, M, D]
    distance, cosine = brute_force(query.detach())
    mine = next(d for d in found if d.name == "layers.1.self_attn.q")
    torch.testing.assert_close(mine.distance, distance)
    torch.testing.assert_close(mine.cosine, cosine)


def test_padding_does_not_count():
    x = noise(2, 3, 4, 5)
    real = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
    kept = torch.cat([x[0, :, :2], x[1, :, :3]], dim=1).unsqueeze(0)  # [1, M, 5, E]
    torch.testing.assert_close(of_outputs(x, real).cosine, of_outputs(kept).cosine)
    assert not torch.allclose(of_outputs(x, real).cosine, of_outputs(x).cosine)


def between_tokens(items) -> float:
    """Mean cosine between two tokens of items [M, T, d], by explicit loops; items are weighted by their tokens."""
    total, count = 0.0, 0
    for x in items:
        rows = x.double().transpose(0, 1).flatten(1).tolist()
        for s, a in enumerate(rows):
            others = [b for t, b in enumerate(rows) if t != s]
            for b in others:
                norms = math.hypot(*a) * math.hypot(*b)
                total += sum(x * y for x, y in zip(a, b, strict=True)) / norms / len(others) if norms else 0.0
        count += len(rows) if len(rows) > 1 else 0
    return total / count


def test_cosine_between_tokens_over_all_pairs():
    x = noise(2, 3, 4, 5) + 0.5
    assert of_outputs(x).tokens == pytest.approx(between_tokens(x), rel=1e-12)
    real = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 1]], dtype=torch.bool)
    kept = [x[0][:, [0, 2, 3]], x[1][:, [1, 3]]]
    assert of_outputs(x, real).tokens == pytest.approx(between_tokens(kept), rel=1e-12)
    parts = [(of_outputs(each.unsqueeze(0)), float(each.shape[1])) for each in kept]
    assert merged(parts).tokens == pytest.approx(between_tokens(kept), rel=1e-12)


def test_tokens_at_their_extremes():
    same = noise(2, 3, 1, 5).expand(2, 3, 4, 5)
    assert of_outputs(same).tokens == pytest.approx(1)
    assert of_outputs(torch.cat([same, -same], dim=2)).tokens == pytest.approx(-1 / 7)  # 4 and 4 of 8
    zeros = torch.cat([same[:1], torch.zeros(1, 3, 1, 5)], dim=2)
    assert of_outputs(zeros).tokens == pytest.approx(between_tokens(zeros))  # a zero token has cosine 0
    assert of_outputs(1e-30 * same).tokens == pytest.approx(1)
    one = of_outputs(noise(2, 3, 1, 5))
    assert math.isnan(one.tokens) and math.isnan(of_attention(same.softmax(-1)).tokens)
    assert merged([(one, 2.0), (of_outputs(same), 8.0)]).tokens == pytest.approx(1)  # nan has no weight
    assert math.isnan(merged([(one, 2.0), (one, 1.0)]).tokens)


def test_constant_values_make_tokens_equal_but_not_heads():
    """With values that do not depend on the token, all tokens of a layer are equal; heads can still differ."""
    model, inputs = build("bert, sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "query.weight" in name or "key.weight" in name:
                parameter.mul_(30)  # attention of an untrained model is nearly uniform
    before = [layer.diversity("outputs").tokens for layer in capture(model, inputs).layers]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "value.weight" in name:
                parameter.zero_()
            if "value.bias" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    after = [layer.diversity("outputs") for layer in capture(model, inputs).layers]
    assert all(x < 0.9 for x in before) and all(d.tokens > 0.999999 for d in after)
    assert all(d.mean_cosine < 0.9 for d in after)


def test_effective_number_against_its_formula():
    x = noise(1, 4, 3, 6)
    found = of_outputs(x)
    shares = torch.linalg.eigvals(found.cosine / found.cosine.trace()).real
    expected = math.exp(-sum(s * math.log(s) for s in shares.tolist() if s > 0))
    assert found.effective_heads == pytest.approx(expected)
    assert 1 < expected < 4


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (torch.eye(4), 4.0),
        (3 * torch.eye(4)[[0, 0, 0, 0]], 1.0),
        (torch.tensor([[1.0, 2.0], [-2.0, -4.0]]), 1.0),  # opposite directions count as one
        (torch.eye(4)[[0, 0, 1, 1]], 2.0),
        (torch.eye(3) - 1 / 3, 2.0),  # a simplex: cosines of -1/2, a plane shared evenly
        (torch.cat([torch.eye(3), torch.zeros(1, 3)]), 3.0),  # a head of zeros adds nothing
        (torch.zeros(3, 5), 1.0),
        (torch.ones(1, 5), 1.0),
    ],
)
def test_effective_number_at_its_extremes(heads, expected):
    found = of_outputs(heads[None, :, None, :])
    assert found.effective_heads == pytest.approx(expected, abs=1e-6)
    scaled = of_outputs(1e-3 * heads[None, :, None, :])
    assert scaled.effective_heads == pytest.approx(expected, abs=1e-6)


def test_permuting_heads_permutes_the_matrices():
    x, order = noise(2, 5, 3, 4), [3, 1, 4, 0, 2]
    found, moved = of_outputs(x), of_outputs(x[:, order])
    torch.testing.assert_close(moved.cosine, found.cosine[order][:, order])
    torch.testing.assert_close(moved.distance, found.distance[order][:, order])
    assert moved.effective_heads == pytest.approx(found.effective_heads)


def test_distance_of_nearly_equal_heads_is_accurate():
    base = noise(1, 1, 1, 4096).double()
    heads = torch.cat([base, base + 1e-9], dim=1)  # [1, 2, 1, E]
    assert of_outputs(heads).mean_distance == pytest.approx(1e-9 * math.sqrt(4096), rel=1e-3)


def test_one_head_has_no_pairs():
    found = of_outputs(noise(1, 1, 2, 3))
    assert math.isnan(found.mean_cosine) and math.isnan(found.mean_distance)
    assert found.closest() == []


def test_invalid_tensors_are_refused():
    with pytest.raises(DivergedError, match="layer 3: outputs contain NaN"):
        of_outputs(torch.full((1, 2, 3, 4), math.nan), name="layer 3")
    with pytest.raises(ValueError, match=r"\[2, 3, 4\]"):
        of_outputs(noise(2, 3, 4))
    with pytest.raises(ValueError, match="at least one"):
        of_outputs(noise(1, 2, 3, 4), torch.zeros(1, 3, dtype=torch.bool))
    assert effective_number(torch.eye(2)) == pytest.approx(2)


def test_parts_are_merged_by_their_weights():
    """A part with three times as many positions counts three times; positions of both together give the same."""
    torch.manual_seed(0)
    long, short = torch.randn(1, 3, 6, 4), torch.randn(1, 3, 2, 4)
    found = merged([(of_outputs(long), 6), (of_outputs(short), 2)])
    whole = of_outputs(torch.cat([long, short], dim=2))
    torch.testing.assert_close(found.cosine, whole.cosine)
    torch.testing.assert_close(found.distance, whole.distance)
    tokens = (6 * of_outputs(long).tokens + 2 * of_outputs(short).tokens) / 8
    assert found.tokens == pytest.approx(tokens)
