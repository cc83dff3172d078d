"""Rules reduce gradients, so the eps of an optimizer may become too large: the warning, and its numbers."""

import warnings

import pytest
import torch
from torch import nn

from repulsive import SGLD, SPOS, SVGD, repel

SMALL = 1e-4  # value of every gradient element


def attention() -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(32, 4, bias=False)


def moved(rule, eps: float) -> float:
    """Distance that heads move in the first steps of Adam with small, constant gradients."""
    model = attention()
    before = model.in_proj_weight.detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=eps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        repel(model, optimizer, rule, verbose=False)
    for _ in range(3):
        model.in_proj_weight.grad = torch.full_like(before, SMALL)
        optimizer.step()
    return float((model.in_proj_weight.detach() - before).norm())


@pytest.mark.parametrize(
    ("rule", "advised"),
    [
        (SVGD(stepsize=0.01, alpha=0.0), "4"),
        (SPOS(stepsize=0.01, alpha=0.0, beta=4.0), "2"),
        (SGLD(stepsize=0.001, temperature=0.0), "1"),
    ],
    ids=["SVGD", "SPOS", "SGLD"],
)
def test_a_large_eps_is_warned_about(rule, advised):
    model = attention()
    with pytest.warns(UserWarning, match=rf"slows them down; choose a larger stepsize \({advised} gives"):
        repel(model, torch.optim.AdamW(model.parameters(), eps=1e-6), rule, verbose=False)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.ASGD])
@pytest.mark.parametrize(("stepsize", "is_warned"), [(1.9, True), (2.0, False)])
def test_less_than_half_of_the_gradient_under_sgd_is_warned_about(stepsize, is_warned, kind):
    model = attention()  # 4 heads
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        repel(model, kind(model.parameters(), lr=0.1), SVGD(stepsize), verbose=False)
    assert ["SGD does not rescale it" in str(one.message) for one in caught] == [True] * is_warned


def test_the_warning_is_right():
    plain, slow = moved(None, 1e-6), moved(SVGD(stepsize=0.01, alpha=0.0, smoothing=0.0), 1e-6)
    assert slow < 0.3 * plain  # the gradient, 1e-4, is a quarter of the effective eps, 4e-4
    assert moved(SVGD(stepsize=4.0, alpha=0.0, smoothing=0.0), 1e-6) == pytest.approx(plain, rel=1e-5)
    assert moved(SVGD(stepsize=0.01, alpha=0.0, smoothing=0.0), 1e-12) == pytest.approx(plain, rel=0.02)


@pytest.mark.parametrize(
    "make",
    [
        lambda weights: torch.optim.AdamW(weights),
        lambda weights: torch.optim.AdamW(weights, weight_decay=0.1),
        lambda weights: torch.optim.RMSprop(weights),
        lambda weights: torch.optim.Adafactor(weights),  # has two of them
    ],
    ids=["AdamW", "AdamW with decay", "RMSprop", "Adafactor"],
)
@pytest.mark.parametrize("rule", [SVGD(), SVGD(stepsize=0.01), SPOS(), SGLD(), None], ids=str)
def test_usual_settings_give_no_warning(make, rule, recwarn):
    model = attention()
    repel(model, make(model.parameters()), rule, noise_in="gradient", verbose=False)
    assert not recwarn.list


def test_only_the_eps_of_heads_counts(recwarn):
    model = nn.TransformerEncoderLayer(32, 4)
    heads = [model.self_attn.in_proj_weight]
    others = [p for p in model.parameters() if p is not heads[0]]
    optimizer = torch.optim.Adam([{"params": heads}, {"params": others, "eps": 1e-3}])
    repel(model, optimizer, SVGD(stepsize=0.01), verbose=False)
    assert not recwarn.list
