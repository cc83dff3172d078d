"""The Transformer: what it computes, what it hides, and that its heads are found like anyone's."""

import pytest
import torch

from repulsive import find_heads, verify_heads
from repulsive.lab.systems.translation.model import LONGEST, Transformer, TransformerConfig, sinusoids


def make(**changes):
    torch.manual_seed(0)
    model = Transformer(TransformerConfig.tiny(50, width=32, feed_forward=48, dropout=0.0, **changes)).double()
    return model, torch.randint(1, 50, (3, 7)), torch.randint(1, 50, (3, 5))


@pytest.mark.parametrize("pre_norm", [False, True])
def test_the_future_and_padding_are_hidden(pre_norm):
    model, source, target = make(pre_norm=pre_norm)
    whole = model(source, target)
    assert whole.shape == (3, 5, 50)
    changed = target.clone()
    changed[:, 3:] = 1
    assert torch.allclose(model(source, changed)[:, :3], whole[:, :3])
    assert not torch.allclose(model(source, changed)[:, 3:], whole[:, 3:])
    padded = torch.cat([source, torch.zeros(3, 2, dtype=torch.long)], dim=1)
    assert torch.allclose(model(padded, target), whole)


def test_collected_tensors_agree_with_the_fused_attention():
    model, source, target = make()
    logits, outputs = model(source, target, collect="outputs")
    again, weights = model(source, target, collect="weights")
    _, values = model(source, target, collect="values")
    assert torch.allclose(logits, again)
    assert len(outputs) == len(weights) == len(values) == 2 + 2 * 2
    for z, a, v in zip(outputs, weights, values, strict=True):
        assert torch.allclose(a @ v, z)
        assert torch.allclose(a.sum(-1), torch.ones_like(a.sum(-1)))
    with pytest.raises(ValueError, match="collect"):
        model(source, target, collect="maps")


def test_heads_are_found_and_proved():
    model, source, target = make()
    groups = find_heads(model)
    assert len(groups) == 3 * (2 + 2 + 2)
    assert {g.where for g in groups} == {"encoder", "decoder", "cross"}
    assert all(report.status == "verified" for report in verify_heads(model, (source, target)))
    assert len(find_heads(model, layers="first")) == 9


def test_sizes():
    assert TransformerConfig.small(10).feed_forward == 1024
    assert TransformerConfig.base(10).heads == 8
    assert TransformerConfig.big(10).width == 1024
    with pytest.raises(ValueError, match="heads"):
        TransformerConfig(10, width=30, heads=4)
    attention = sum(g.num_heads * g.dim for g in find_heads(Transformer(TransformerConfig.small(10))))
    assert attention == 54 * 512 * 512


def test_positions():
    table = sinusoids(4, 6)
    assert torch.allclose(table[0], torch.tensor([0.0, 1.0] * 3))
    assert torch.allclose(table[2, 0], torch.tensor(2.0).sin())
    assert torch.allclose(table[2, 1], torch.tensor(2.0).cos())


# word by word


def padded_source(source):
    source = source.clone()
    source[1, 4:] = 0
    return source


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_word_by_word_the_logits_are_the_same(pre_norm, dtype, near):
    model, source, target = make(pre_norm=pre_norm)
    model, source = model.to(dtype), padded_source(source)
    whole = model(source, target)  # [B, T, V]
    cache = model.start(source)
    for place in range(target.shape[1]):
        assert cache.length == place
        step = model.step(target[:, place : place + 1], cache)
        assert torch.allclose(step[:, 0], whole[:, place], rtol=0, atol=near)


def test_hypotheses_that_are_kept_go_on_with_their_own_past():
    model, source, target = make()
    source = padded_source(source)
    two = torch.stack([target, target.flip(1)], dim=1)  # [B, 2, T]
    cache = model.start(source)
    for place in range(2):
        model.step(two[:, :, place], cache)
    kept, rows = torch.tensor([[1, 1], [0, 1], [1, 0]]), torch.tensor([2, 1])
    cache.keep(kept, rows)
    chosen = two[torch.arange(3)[:, None], kept][rows]  # [2, 2, T]
    found = model.step(chosen[:, :, 2], cache)
    for i, row in enumerate(rows.tolist()):
        for j in range(2):
            prefix = torch.cat([two[row, kept[row, j], :2], chosen[i, j, 2:3]])
            expected = model(source[row : row + 1], prefix[None])[0, -1]
            assert torch.allclose(found[i, j], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-10), (torch.bfloat16, 0.1)])
def test_a_long_past_of_hypotheses_that_come_and_go(dtype, near):
    """Every step some hypotheses are dropped and others doubled, now and then a sentence: more than fits at first."""
    model, source, _ = make()
    source, draw = padded_source(source), torch.Generator().manual_seed(0)
    cache, rows = model.to(dtype).start(source), torch.arange(3)
    texts = torch.empty(3, 4, 0, dtype=torch.long)  # [B, K, T]
    for place in range(40):
        words = torch.randint(1, 50, (len(rows), 4, 1), generator=draw)
        texts = torch.cat([texts, words], dim=2)
        found = model.step(words[:, :, 0], cache)
        for i, row in enumerate(rows.tolist()):
            expected = model(source[row : row + 1].expand(4, -1), texts[i])[:, -1]
            assert torch.allclose(found[i], expected, rtol=0, atol=near)
        kept = torch.randint(4, (len(rows), 4), generator=draw)
        texts = texts[torch.arange(len(rows))[:, None], kept]
        stay = torch.tensor([2, 0]) if place == 20 else None
        cache.keep(kept, stay)
        if stay is not None:
            rows, texts = rows[stay], texts[stay]
    assert cache.length == 40


def test_a_sentence_without_positions_is_refused():
    model, _, target = make()
    with pytest.raises(ValueError, match="cut it, or split it"):
        model(torch.ones(1, LONGEST + 1, dtype=torch.long), target[:1])
