"""Reweighted heads: one pass equals one pass per head; the head bootstrap has the documented moments."""

import doctest
import itertools

import pytest
import torch
from torch import nn

from repulsive.diagnostics import uncertainty
from repulsive.diagnostics.hooks import reweighted_heads
from repulsive.diagnostics.hooks.reweighted_heads import leave_one_out, reweighted_logits
from repulsive.diagnostics.redundancy import head_ablation
from repulsive.diagnostics.uncertainty import bootstrap_weights, mixture
from repulsive.errors import HeadLayoutError
from repulsive.lab.systems.classification.model import PairClassifier, SelfAttentiveConfig, SentenceClassifier
from repulsive.lab.systems.translation.model import Transformer, TransformerConfig

HEADS = 3


def classifier(kind, **changes) -> nn.Module:
    torch.manual_seed(0)
    return kind(SelfAttentiveConfig.tiny(vocabulary=30, heads=HEADS, **changes))


def sentences(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 8, (count,), generator=make)
    tokens = torch.randint(2, 30, (count, 8), generator=make)
    return tokens.masked_fill(torch.arange(8) >= lengths.unsqueeze(1), 0), lengths


def inputs_of(kind) -> tuple[torch.Tensor, ...]:
    (a, m), (b, n) = sentences(6, 1), sentences(6, 2)
    return (a, b, m, n) if kind is PairClassifier else (a, m)


@pytest.mark.parametrize("module", [reweighted_heads, uncertainty], ids=["reweighted_heads", "uncertainty"])
def test_the_examples_in_the_docstrings_run(module):
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


@pytest.mark.parametrize("own_hidden", [False, True])
@pytest.mark.parametrize("kind", [SentenceClassifier, PairClassifier])
def test_one_pass_equals_one_pass_per_head(kind, own_hidden):
    model, inputs = classifier(kind, own_hidden=own_hidden), inputs_of(kind)
    logits = reweighted_logits(model, inputs, leave_one_out(HEADS))  # [M, B, C]
    slow = head_ablation(model, lambda m: m(*inputs)[:, 1])
    assert slow.items is not None
    whole = reweighted_logits(model, inputs, torch.ones(1, HEADS))[0]
    torch.testing.assert_close(logits[..., 1].double() - whole[:, 1].double(), slow.items[0], atol=1e-6, rtol=0)
    assert float(slow.change.abs().min()) > 1e-5  # every head has an effect, so the test can fail
    torch.testing.assert_close(whole, model.eval()(*inputs))


def test_the_model_does_not_change():
    model = classifier(SentenceClassifier).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    reweighted_logits(model, inputs_of(SentenceClassifier), leave_one_out(HEADS))
    assert model.training and all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert len(model(*inputs_of(SentenceClassifier))) == 6  # the hook that repeats the batch is removed


def test_permuting_weightings_permutes_the_logits():
    model, inputs = classifier(SentenceClassifier), inputs_of(SentenceClassifier)
    weights = torch.rand(4, HEADS, generator=torch.Generator().manual_seed(3))
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(
        reweighted_logits(model, inputs, weights)[order], reweighted_logits(model, inputs, weights[order])
    )


def test_models_with_other_attention_are_refused():
    model = Transformer(TransformerConfig.tiny(vocabulary=30))
    with pytest.raises(HeadLayoutError, match="head_ablation"):
        reweighted_logits(model, (torch.ones(1, 3).long(), torch.ones(1, 3).long()), torch.ones(1, 4))
    with pytest.raises(HeadLayoutError, match="one additive attention of 5 heads"):
        reweighted_logits(classifier(SentenceClassifier), inputs_of(SentenceClassifier), torch.ones(1, 5))


def linear_classifier() -> nn.Module:
    """A classifier with a linear readout, so that logits are the z of the documentation."""
    model = classifier(SentenceClassifier).double()
    model.classify = nn.Linear(model.classify[1].in_features, 5).double()
    return model


def test_the_head_bootstrap_has_the_mean_of_the_model_and_the_variance_of_the_heads():
    model, inputs = linear_classifier(), inputs_of(SentenceClassifier)
    draws = torch.tensor(list(itertools.product(range(HEADS), repeat=HEADS)))  # all M^M equally likely resamples
    weights = torch.nn.functional.one_hot(draws, HEADS).sum(1).double()
    z = reweighted_logits(model, inputs, weights)  # [27, B, C]
    whole = reweighted_logits(model, inputs, torch.ones(1, HEADS))[0]
    torch.testing.assert_close(z.mean(0), whole)
    alone = reweighted_logits(model, inputs, torch.eye(HEADS)) - model.classify.bias  # W_i m_i, [M, B, C]
    torch.testing.assert_close(z.var(0, correction=0), HEADS * alone.var(0, correction=0))
    single = reweighted_logits(model, inputs, torch.eye(HEADS)).mean(0)
    assert (single - whole).abs().max() > 0.01  # a single head has another mean, so it is not a sample


def test_permuting_heads_does_not_change_the_logits():
    model, inputs = linear_classifier(), inputs_of(SentenceClassifier)
    weights = torch.tensor([[2.0, 1.0, 0.0]]).double()
    before = reweighted_logits(model, inputs, weights)
    order = torch.tensor([1, 2, 0])
    with torch.no_grad():
        score, readout = model.encoder.attention.score.weight, model.classify.weight
        score.copy_(score[order])
        readout.copy_(readout.unflatten(1, (HEADS, -1))[:, order].flatten(1))
    torch.testing.assert_close(reweighted_logits(model, inputs, weights[:, order]), before)


def test_resamples_are_multinomial():
    found = bootstrap_weights(8, 4000, torch.Generator().manual_seed(0))
    assert found.shape == (4000, 8) and (found.sum(1) == 8).all() and (found == found.round()).all()
    assert (found.mean(0) - 1).abs().max() < 0.06  # four standard errors of 0.015
    assert float(found.var(0).mean()) == pytest.approx(7 / 8, rel=0.05)
    again = bootstrap_weights(8, 4000, torch.Generator().manual_seed(0))
    assert torch.equal(found, again)


def test_a_mixture_is_better_than_its_members_on_average():
    make = torch.Generator().manual_seed(1)
    logits, labels = torch.randn(6, 50, 4, generator=make) * 3, torch.randint(4, (50,), generator=make)
    p = mixture(logits)
    torch.testing.assert_close(p.sum(-1), torch.ones(50).double())
    of_members = -logits.double().log_softmax(-1)[:, torch.arange(50), labels].mean()
    assert -p[torch.arange(50), labels].log().mean() < of_members - 0.1


def test_invalid_arguments_are_refused():
    for call in (
        lambda: bootstrap_weights(0, 3, torch.Generator()),
        lambda: bootstrap_weights(3, 0, torch.Generator()),
        lambda: mixture(torch.zeros(0, 3, 2)),
        lambda: mixture(torch.zeros(3, 2)),
    ):
        with pytest.raises(ValueError, match="need"):
            call()
