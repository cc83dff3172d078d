"""Particles sample the target distribution: mean *and* spread. Without repulsion the same check fails."""

import pytest
import torch

from repulsive.particles import SGLD, SPOS, SVGD


def train(rule, start, potential, optimizer, steps, lr, seed=0):
    """Run a torch optimizer on particles [..., M, D] whose potential energy is `potential` [..., M, D] -> [..., M]."""
    theta = start.clone().requires_grad_()
    stepper = optimizer([theta], lr=lr)
    source = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        (grad,) = torch.autograd.grad(potential(theta).sum(), theta)
        theta.grad = rule.gradient(theta.detach(), grad, source, lr=lr)
        stepper.step()
    return theta.detach()


def gaussian(mean, std):
    return lambda x: ((x - mean) / std).square().sum(-1) / 2


def mixture(x):
    """1/3 N(-2, 1) + 2/3 N(2, 1), the example of Liu and Wang (2016): mean 2/3, variance 5 - 4/9."""
    log = lambda centre, weight: weight.log() - (x - centre).square().sum(-1) / 2  # noqa: E731
    return -torch.logaddexp(log(-2.0, torch.tensor(1 / 3)), log(2.0, torch.tensor(2 / 3)))


def matches(x, mean, std):
    return bool((x.mean(-2) - mean).abs().max() < 0.1 * std and (x.std(-2) / std - 1).abs().max() < 0.1)


@pytest.mark.parametrize(("alpha", "expected"), [(1.0, True), (0.0, False)])
def test_svgd_finds_a_gaussian(alpha, expected):
    start = torch.randn(1, 60, 1, generator=torch.Generator().manual_seed(0)).double() - 3
    rule = SVGD(stepsize=1.0, alpha=alpha)
    found = train(rule, start, gaussian(1.5, 0.7), torch.optim.Adam, 800, 0.03)
    assert matches(found, 1.5, 0.7) is expected


@pytest.mark.parametrize(("alpha", "expected"), [(1.0, True), (0.0, False)])
def test_svgd_finds_a_mixture(alpha, expected):
    start = torch.randn(1, 100, 1, generator=torch.Generator().manual_seed(0)).double() - 8
    found = train(SVGD(1.0, alpha), start, mixture, torch.optim.Adagrad, 600, 1.5)
    assert matches(found, 2 / 3, (5 - 4 / 9) ** 0.5) is expected


def test_alpha_is_the_temperature():
    """With alpha = T the particles sample exp(-U / T): the variance of a Gaussian becomes T times as large."""
    start = torch.randn(1, 60, 1, generator=torch.Generator().manual_seed(0)).double()
    found = train(SVGD(1.0, alpha=0.25), start, gaussian(0.0, 1.0), torch.optim.Adam, 800, 0.03)
    assert matches(found, 0.0, 0.5)


@pytest.mark.parametrize(("stepsize", "lr"), [(0.1, 0.5), (0.1, 0.1), (1.0, 0.04), (0.01, 2.0)])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_sgld_has_the_right_variance_at_any_learning_rate(stepsize, lr, temperature):
    """Independent chains under plain SGD; the discretisation itself biases by stepsize * lr / 2, here at most 2.5 %."""
    start = torch.randn(1, 20_000, 1, generator=torch.Generator().manual_seed(3))
    steps = int(8 / (stepsize * lr))
    found = train(SGLD(stepsize, temperature), start, gaussian(0.0, 1.0), torch.optim.SGD, steps, lr)
    assert abs(float(found.var()) / temperature - 1) < 0.05


def test_sgld_with_the_stepsize_alone_under_the_root_would_be_wrong():
    """At learning rate 0.1 the variance would be 0.1."""
    start = torch.randn(1, 20_000, 1, generator=torch.Generator().manual_seed(3))

    class Trap(SGLD):
        def noise_scale(self, lr):
            return super().noise_scale(1.0)

    found = train(Trap(0.1, 1.0), start, gaussian(0.0, 1.0), torch.optim.SGD, 1000, 0.1)
    assert abs(float(found.var()) - 0.1) < 0.01


@pytest.mark.parametrize(("beta", "lr"), [(1.0, 0.3), pytest.param(4.0, 0.5, marks=pytest.mark.slow)])
def test_spos_has_the_right_variance(beta, lr):
    """At least 32 particles, fixed bandwidth, plain SGD: both parts of SPOS have the same target."""
    start = torch.randn(48, 40, 1, generator=torch.Generator().manual_seed(4))
    rule = SPOS(0.1, 1.0, beta, bandwidth=1.0)
    found = train(rule, start, gaussian(0.0, 1.0), torch.optim.SGD, 300, lr)
    assert abs(float(found.square().mean()) - 1) < 0.05
    without = train(SPOS(0.1, 0.0, beta, bandwidth=1.0), start, gaussian(0.0, 1.0), torch.optim.SGD, 300, lr)
    assert abs(float(without.square().mean()) - 1) > 0.05
