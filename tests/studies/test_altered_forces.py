"""Rules with altered forces, against explicit loops over pairs of heads in float64."""

import pytest
import torch

from repulsive import SPOS, SVGD
from repulsive.errors import RuleError
from repulsive.particles.gram import gram
from repulsive.particles.ladder import CosineLadder
from repulsive.particles.priors import Gaussian
from tests.scripts import study

HEADS, SIZE, WIDTH = 5, 7, 3.0  # heads, numbers per head, bandwidth
RULES = {
    "svgd": SVGD(stepsize=HEADS, alpha="auto", ratio=2.3, bandwidth=WIDTH),
    "svgd, fixed alpha": SVGD(stepsize=2.0, alpha=0.4, bandwidth=WIDTH, smoothing=0.5),
    "cosine": CosineLadder(HEADS, alpha=0.7, rung="smoothing"),
    "cosine regulariser": CosineLadder(HEADS, alpha=0.7, rung="regulariser"),
}


@pytest.fixture(scope="module")
def altered():
    with study("studies.altered_forces") as module:
        yield module


@pytest.fixture
def particles():
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(HEADS, SIZE, generator=generator, dtype=torch.float64) for _ in range(2))


def cosine(x, y):
    return torch.dot(x, y) / (x.norm() * y.norm())


def drive_and_forces(name, theta, grad):
    """Compute what the optimizer descends in two parts, head by head: the drive, and minus the repulsive force."""
    rule = RULES[name]
    drive, force = torch.zeros_like(theta), torch.zeros_like(theta)
    for i in range(HEADS):
        for j in range(HEADS):
            if isinstance(rule, CosineLadder):
                smooth = cosine(theta[i], theta[j])
                moved, fixed = (j, i) if rule.rung == "smoothing" else (i, j)
                x = theta[moved].clone().requires_grad_()
                (slope,) = torch.autograd.grad(cosine(x, theta[fixed] if i != j else x), x)
                force[i] -= slope if rule.rung == "smoothing" else -slope
                weight = smooth if rule.rung == "smoothing" else HEADS * float(i == j)
            else:
                kernel = torch.exp(-(theta[i] - theta[j]).square().sum() / WIDTH)
                force[i] -= 2 / WIDTH * kernel * (theta[i] - theta[j])
                weight = rule.smoothing * kernel + (1 - rule.smoothing) * float(i == j)
            drive[i] += weight * grad[j]
    drive, force = rule.stepsize / HEADS * drive, rule.stepsize / HEADS * force
    alpha = rule.ratio * drive.norm() / force.norm() if rule.alpha == "auto" else rule.alpha
    return drive, alpha * force


@pytest.mark.parametrize("name", RULES)
def test_altered_forces_equal_explicit_loops(altered, particles, name):
    theta, grad = particles
    drive, force = drive_and_forces(name, theta, grad)
    rule = RULES[name]
    for step in range(6):
        torch.testing.assert_close(rule.gradient(theta, grad, step=step), drive + force)
        attraction = altered.alter_force(rule, altered.ATTRACTION)
        torch.testing.assert_close(attraction.gradient(theta, grad, step=step), drive - force)
        expected = drive.clone()
        for i in range(HEADS):
            partner = i + 1 + step % (HEADS - 1)
            partner -= HEADS if partner >= HEADS else 0
            assert partner != i
            expected[i] += force[partner]
        wrong = altered.alter_force(rule, altered.WRONG_PARTNER)
        torch.testing.assert_close(wrong.gradient(theta, grad, step=step), expected)
        assert float((expected - drive).norm()) == pytest.approx(float(force.norm()))


@pytest.mark.parametrize("name", RULES)
def test_altered_rules_keep_the_settings_and_have_no_built_in_form(altered, particles, name):
    rule = RULES[name]
    for force in (altered.ATTRACTION, altered.WRONG_PARTNER):
        changed = altered.alter_force(rule, force)
        assert vars(changed) == vars(rule) and isinstance(changed, type(rule))
        assert changed.radial_form(0) is None  # GPU code with SVGD's own formula must not be used
        products = [gram(x) for x in particles]
        before, after = (r.coefficients(*products, step=3) for r in (rule, changed))
        torch.testing.assert_close(after.drive, before.drive)
        assert after.measure.repulsion == before.measure.repulsion


def test_each_head_receives_the_force_of_every_other_head_in_turn(altered):
    assert [altered.partner_shift(step, 4) for step in range(7)] == [1, 2, 3, 1, 2, 3, 1]
    with pytest.raises(RuleError, match="1 head"):
        altered.partner_shift(0, 1)


@pytest.mark.parametrize("rule", [None, SPOS(), SVGD(prior=Gaussian(1.0, 10))])
def test_other_rules_are_refused(altered, rule):
    with pytest.raises(RuleError):
        altered.alter_force(rule, altered.ATTRACTION)
    with pytest.raises(RuleError, match="expected 'attraction'"):
        altered.alter_force(SVGD(), "none")
