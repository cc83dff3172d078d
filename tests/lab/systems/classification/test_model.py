"""The self-attentive classifier: what it computes, that padding is invisible, and that its heads are found."""

import pytest
import torch

from repulsive import SVGD, find_heads, repel, verify_heads
from repulsive.lab.systems.classification.model import (
    AdditiveAttention,
    PairClassifier,
    SelfAttentiveConfig,
    SentenceClassifier,
)

OWN = pytest.mark.parametrize("own_hidden", [False, True])


def make(kind=SentenceClassifier, **changes):
    torch.manual_seed(0)
    model = kind(SelfAttentiveConfig.tiny(40, **changes)).double().eval()
    for name, parameter in model.named_parameters():
        if "bias" in name:  # with zero biases an LSTM that starts at zero stays there all through padding
            torch.nn.init.normal_(parameter)
    return model


def sentences(*lengths, total=9):
    tokens = torch.zeros(len(lengths), total, dtype=torch.long)
    generator = torch.Generator().manual_seed(1)
    for row, length in enumerate(lengths):
        tokens[row, :length] = torch.randint(1, 40, (length,), generator=generator)
    return tokens


@OWN
def test_attention_is_the_formula_word_by_word(own_hidden):
    torch.manual_seed(0)
    attention = AdditiveAttention(width=6, hidden=5, heads=3, own_hidden=own_hidden)
    states, real = torch.randn(2, 4, 6), torch.tensor([[True] * 4, [True, True, False, False]])
    weights, rows = attention(states, real)
    for b, count in enumerate([4, 2]):
        for m in range(3):
            if own_hidden:
                inner, outer = attention.score[m].view(5, 7).split((6, 1), 1)
                outer = outer[:, 0]
            else:
                inner, outer = attention.hidden.weight, attention.score.weight[m]
            scores = torch.stack([outer @ torch.tanh(inner @ states[b, t]) for t in range(count)])
            expected = scores.exp() / scores.exp().sum()
            assert torch.allclose(weights[b, m, :count], expected)
            assert (weights[b, m, count:] == 0).all()
            assert torch.allclose(rows[b, m], sum(expected[t] * states[b, t] for t in range(count)), atol=1e-6)


@OWN
def test_padding_and_neighbours_change_nothing(own_hidden):
    model = make(own_hidden=own_hidden)
    tokens = sentences(9, 4, 1, 6)
    logits, attention, rows = model(tokens, collect=True)
    assert logits.shape == (4, 5) and attention.shape == (4, 4, 9) and rows.shape == (4, 4, 24)
    assert torch.allclose(attention.sum(-1), torch.ones(4, 4, dtype=torch.float64))
    for row, length in enumerate([9, 4, 1, 6]):
        alone, seen, own = model(tokens[row : row + 1, :length], collect=True)
        assert torch.allclose(alone[0], logits[row], atol=1e-12)
        assert torch.allclose(seen[0], attention[row, :, :length], atol=1e-12)
        assert torch.allclose(own[0], rows[row], atol=1e-12)
        assert (attention[row, :, length:] == 0).all()
    assert torch.equal(model(tokens, torch.tensor([9, 4, 1, 6])), logits)
    assert torch.equal(model(tokens.int()), logits)


def test_later_words_are_read():
    model, tokens = make(), sentences(9, 4)
    changed = tokens.clone()
    changed[0, 8] = tokens[0, 8] % 39 + 1
    assert not torch.allclose(model(changed)[0], model(tokens)[0])
    assert torch.equal(model(changed)[1], model(tokens)[1])


def test_an_empty_sentence_is_finite_and_padding_in_front_is_refused():
    model = make()
    assert model(sentences(3, 0)).isfinite().all()
    assert torch.allclose(model(sentences(0, 0, total=1)), model(sentences(0, 0, total=5)))
    with pytest.raises(ValueError, match="sentence 1 has padding"):
        model(sentences(3, 4).flip(1)[:, 5:].flip(0))


@OWN
@pytest.mark.parametrize("heads", [1, 2, 5, 30, 64])
def test_heads_are_found_and_proved(heads, own_hidden):
    model = make(heads=heads, own_hidden=own_hidden)
    (group,) = find_heads(model)
    assert (group.part, group.num_heads, group.dim) == ("v", heads, 8 * 25 if own_hidden else 8)
    (report,) = verify_heads(model, sentences(9, 4))
    assert report.status == "verified" and report.leak == 0


@OWN
def test_a_repulsive_step_moves_the_heads_and_nothing_else_differently(own_hidden):
    after = []
    for rule in (None, SVGD(stepsize=1.0, alpha=1.0)):
        model = make(own_hidden=own_hidden)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        repel(model, optimizer, rule=rule)
        torch.nn.functional.cross_entropy(model(sentences(9, 4, 6)), torch.tensor([0, 3, 4])).backward()
        optimizer.step()
        after.append({name: p.detach() for name, p in model.named_parameters()})
    differing = {name for name in after[0] if not torch.equal(after[0][name], after[1][name])}
    assert differing == {"encoder.attention.score" + ("" if own_hidden else ".weight")}


def test_pairs_are_gated_row_by_row():
    model = make(PairClassifier, classes=3, heads=3)
    premise, hypothesis = sentences(9, 4), sentences(2, 6, total=6)
    logits, (seen_p, seen_h), (of_p, of_h) = model(premise, hypothesis, collect=True)
    assert logits.shape == (2, 3) and seen_p.shape == (2, 3, 9) and seen_h.shape == (2, 3, 6)
    features = torch.stack(
        [(of_p[:, m] @ model.premise_gate[m]) * (of_h[:, m] @ model.hypothesis_gate[m]) for m in range(3)], dim=1
    )
    assert torch.allclose(model.classify(features.flatten(1)), logits)
    assert torch.allclose(model(premise[:1], hypothesis[:1, :2]), logits[:1])
    assert not torch.allclose(model(hypothesis, premise), logits)


def test_pair_heads_are_found_once_for_both_sentences():
    model = make(PairClassifier, classes=3, heads=5)
    (group,) = find_heads(model)
    assert (group.part, group.num_heads, group.dim) == ("v", 5, 8)
    (report,) = verify_heads(model, (sentences(9, 4), sentences(3, 7)))
    assert report.status == "verified"


def test_word_vectors():
    vectors = torch.randn(40, 16)
    model = SentenceClassifier(SelfAttentiveConfig.tiny(40), vectors)
    assert torch.equal(model.encoder.embedding.weight[1:], vectors[1:])
    assert (model.encoder.embedding.weight[0] == 0).all()
    with pytest.raises(ValueError, match=r"\[40, 16\]"):
        SentenceClassifier(SelfAttentiveConfig.tiny(40), torch.randn(40, 50))


def test_published_sizes():
    age, yelp, snli = (getattr(SelfAttentiveConfig, task)(100) for task in ("age", "yelp", "snli"))
    assert [(c.classes, c.units, c.hidden, c.heads, c.mlp) for c in (age, yelp, snli)] == [
        (5, 300, 350, 30, 2000),
        (5, 300, 350, 30, 3000),
        (3, 300, 150, 30, 4000),
    ]
    assert SelfAttentiveConfig.yelp(100, heads=10).heads == 10
    with torch.device("meta"):
        assert sum(p.numel() for p in AdditiveAttention(600, 350, 30).parameters()) == 350 * 600 + 30 * 350
    with pytest.raises(ValueError, match="heads=0"):
        SelfAttentiveConfig.yelp(100, heads=0)
    with pytest.raises(ValueError, match="padding"):
        SelfAttentiveConfig.yelp(100, padding=100)
