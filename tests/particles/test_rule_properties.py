"""The properties by which rules tell the rest of the package what they need."""

import pytest
import torch

from repulsive.particles import SGLD, SPOS, SVGD, CosineLadder, KernelFree
from repulsive.particles.gram import gram
from repulsive.particles.kernels import Hinge
from repulsive.particles.rule import Coefficients, Rule


class Halved(Rule):
    """The smallest rule a user can write: every property has its default."""

    stepsize = 0.5

    def coefficients(self, theta, grad=None, *, step=0):
        heads = theta.num_particles
        drive = 0.5 * torch.eye(heads, dtype=theta.products.dtype).expand_as(theta.products[..., :-1, :-1])
        return Coefficients(drive, force=None, measure=None)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Halved(), set()),
        (SGLD(), {"has_noise"}),
        (SVGD(), {"has_interaction"}),
        (SVGD(alpha="auto"), {"has_interaction", "holds_ratio", "needs_gradient_products"}),
        (SVGD(space="logits", circuits="qk+ov"), {"has_interaction", "reads_tokens", "moves_values"}),
        (SPOS(noise="released"), {"has_interaction", "has_noise", "scales_noise"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_rules_state_their_needs(rule, expected):
    names = {name for name in dir(Rule) if isinstance(getattr(Rule, name), property)} - {
        "has_matrix_form",
        "is_scheduled",
    }
    assert {name for name in names if getattr(rule, name)} == expected


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Halved(), True),  # unknown, so it may depend on the step
        (SGLD(), False),
        (SVGD(alpha="auto"), False),
        (SVGD(alpha=lambda step: 0.1), True),
        (SVGD(alpha="auto", ratio=lambda step: 0.1), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_rule_with_a_schedule_says_so(rule, expected):
    assert rule.is_scheduled is expected


def test_drive_scale_is_the_factor_on_a_heads_own_gradient():
    assert Halved().drive_scale(4) is None
    assert SGLD(0.3).drive_scale(4) == 0.3
    assert SVGD(0.2).drive_scale(4) == pytest.approx(0.05)
    assert SPOS(0.2, beta=4.0).drive_scale(4) == pytest.approx(0.1)
    assert CosineLadder(0.2).drive_scale(4) == pytest.approx(0.2)


class OwnCoefficients(SVGD):
    def coefficients(self, theta, grad=None, *, step=0):
        return Halved().coefficients(theta)


class OwnForce(KernelFree):
    def interact(self, theta):
        return SVGD.interact(self, theta)


class OwnNoise(SGLD):
    def coefficients(self, theta, grad=None, *, step=0):
        return Halved().coefficients(theta)


@pytest.mark.parametrize(
    "rule",
    [
        SVGD(kernel=lambda x, y: x.sum(-1)),
        SVGD(bandwidth=lambda d2: d2.mean()),
        SVGD(space="logits"),
        CosineLadder(),
        OwnCoefficients(),
        OwnForce(),
        OwnNoise(),
    ],
    ids=["callable kernel", "callable bandwidth", "logits", "ladder", "own", "own force", "own noise"],
)
def test_other_formulas_have_no_radial_form(rule):
    assert rule.radial_form(0) is None


@pytest.mark.parametrize(
    "rule",
    [
        SVGD(stepsize=0.3, smoothing=0, space="sphere"),
        SPOS(0.3, 0.5, 7.0, smoothing=0),
        SGLD(0.3, 0.5),
        KernelFree(stepsize=0.3, smoothing=0),
    ],
)
def test_a_form_that_does_not_mix_gradients_knows_their_factor(rule):
    for heads in (1, 2, 5):
        form, products = rule.radial_form(0), gram(torch.randn(heads, 6, dtype=torch.float64))
        expected = rule.coefficients(products).drive
        assert not form.mixes_gradients
        assert torch.allclose(expected, form.drive(heads) * torch.eye(heads, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("rule", [SVGD(), SPOS(smoothing=0.5), KernelFree()])
def test_smoothing_mixes_gradients(rule):
    assert rule.radial_form(0).mixes_gradients


def test_the_radial_form_follows_a_schedule():
    forms = [SPOS(alpha=lambda step: 0.1 * step, beta=2.0, bandwidth=3, kernel="imq").radial_form(n) for n in (1, 2)]
    assert [form.alpha for form in forms] == [0.1, 0.2]
    assert forms[0].ratio is None
    assert (forms[0].kernel, forms[0].bandwidth, forms[0].own_drive) == ("imq", 3.0, 0.5)
    auto = SVGD(alpha="auto", ratio=lambda step: 0.01 * step)
    assert [auto.radial_form(n).ratio for n in (1, 2)] == [0.01, 0.02]


@pytest.mark.parametrize(
    ("rule", "kernel"),
    [
        (SVGD(space="sphere", bandwidth="released-lower"), "rbf"),
        (SVGD(kernel="imq"), "imq"),
        (SVGD(kernel="cosine"), "cosine"),
        (SVGD(kernel=Hinge(0.7), space="sphere"), "hinge"),
        (KernelFree(), "constant"),
        (SGLD(), "none"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_radial_form_names_the_kernel(rule, kernel):
    form = rule.radial_form(0)
    assert form.kernel == kernel
    assert form.threshold == (0.7 if kernel == "hinge" else 0)
    assert form.has_force == (kernel != "none")
