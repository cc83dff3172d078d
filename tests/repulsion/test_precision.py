"""Half-precision weights with float32 master weights, and all implementations of Adam."""

import pytest
import torch

from repulsive import SPOS, SVGD, find_heads, repel

RULE = SVGD(alpha=0.5)
HALVES = [torch.bfloat16, torch.float16]


class Masters(torch.optim.Optimizer):
    """SGD with momentum on float32 copies of half-precision weights, as in mixed-precision training."""

    def __init__(self, params, lr, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"master": p.detach().float(), "speed": torch.zeros_like(p, dtype=torch.float32)}

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        for p in group["params"]:
            state = self.state[p]
            state["speed"].mul_(group["momentum"]).add_(p.grad.float())
            state["master"].sub_(group["lr"] * state["speed"])
            p.copy_(state["master"])


def repel_by_hand(model, rule):
    """The rule on whole groups in float32, rounded once, as `repel` computes it for half-precision weights."""
    for group in find_heads(model):
        (part,) = group.slices
        grad = part.parameter().grad
        part.put(grad, rule.gradient(group.read().float(), part.take(grad).float()))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_float32_masters_of_half_precision_weights(dtype, make_model, backward):
    """Steps are equal to those computed by hand."""
    one, two = make_model(dtype=dtype), make_model(dtype=dtype)
    by_repel, by_hand = Masters(one.parameters(), lr=0.05), Masters(two.parameters(), lr=0.05)
    handle = repel(one, by_repel, RULE, verbose=False)
    for index in range(4):
        backward(one, index)
        by_repel.step()
        backward(two, index)
        repel_by_hand(two, RULE)
        by_hand.step()
    assert handle.steps == 4
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        assert p.dtype == dtype and torch.equal(p, q)
        assert torch.allclose(by_repel.state[p]["master"], by_hand.state[q]["master"], rtol=1e-6, atol=1e-7)
    group = handle.groups[0].slices[0].parameter()
    assert not torch.equal(by_repel.state[group]["master"], group.float()), "masters hold digits that weights cannot"


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_noise_in_parameters_reaches_the_weights_but_not_the_masters(dtype, make_model, backward):
    """Master weights overwrite weights at every step, so this noise lasts for one forward pass only."""
    model = make_model(dtype=dtype)
    optimizer = Masters(model.parameters(), lr=0.05)
    repel(model, optimizer, SPOS(0.1, 0.5, 1.0), noise_in="parameter", verbose=False)
    backward(model)
    optimizer.step()
    weight = model.stack.layers[0].self_attn.in_proj_weight
    assert float((weight.detach().float() - optimizer.state[weight]["master"]).abs().max()) > 0.1


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("how", ["fused", "foreach"])
@pytest.mark.parametrize("rule", [RULE, SPOS(0.1, 0.5, 100.0)], ids=["svgd", "spos"])
def test_fused_and_foreach_optimizers_equal_the_loop(kind, how, rule, make_model, backward):
    models = []
    for options in ({"fused": False, "foreach": False}, {how: True}):
        model = make_model()
        optimizer = kind(model.parameters(), lr=0.01, **options)
        handle = repel(model, optimizer, rule, verbose=False)
        for index in range(3):
            backward(model, index)
            optimizer.step()
        assert handle.steps == 3
        models.append(model)
    pairs = zip(*(model.parameters() for model in models), strict=True)
    assert all(torch.allclose(p, q, rtol=1e-9, atol=1e-12) for p, q in pairs)


def test_float16_gradients_that_would_overflow_inside_the_rule(make_model, backward):
    """Products of float16 numbers near 6e4 exceed float16; the rule computes them in float32 and above."""
    model = make_model(dtype=torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    handle = repel(model, optimizer, SVGD(alpha="auto", ratio=0.1), verbose=False)
    backward(model)
    for group in handle.groups:
        (part,) = group.slices
        part.parameter().grad.normal_(generator=torch.Generator().manual_seed(0)).mul_(1e4)
    handle.apply()
    for line in handle.report():
        assert line.drive > 1e3 and line.ratio == pytest.approx(0.1, rel=1e-6)
    assert all(p.grad.isfinite().all() for p in model.parameters())
