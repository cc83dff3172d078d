"""The ladder of appendix C.6: each rung against its formula, and its effect on the similarity of heads."""

import pytest
import torch

from repulsive.particles import SVGD, CosineLadder
from tests.particles import oracle


def heads(seed=0, m=4, d=10):
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(m, d, generator=source, dtype=torch.float64) + shift for shift in (1, 0)]


def mean_cosine(theta):
    return torch.cosine_similarity(theta[:, None], theta[None], dim=-1).mean()


def test_the_regulariser_is_the_gradient_of_the_mean_similarity():
    theta, grad = heads()
    moving = theta.clone().requires_grad_()
    # the derivative by one head, with the others fixed, so every pair counts once
    similarity = torch.cosine_similarity(moving[:, None], theta[None], dim=-1).sum() / len(theta)
    (slope,) = torch.autograd.grad(similarity, moving)
    found = CosineLadder(1.0, alpha=0.3).gradient(theta, grad)
    assert torch.allclose(found, grad + 0.3 * slope, rtol=1e-10)


def test_the_derivative_rung_takes_the_gradient_with_respect_to_the_other_head():
    theta, grad = heads()
    force = oracle.phi(theta, torch.zeros_like(grad), alpha=1.0, kernel="cosine")
    found = CosineLadder(1.0, alpha=0.3, rung="derivative").gradient(theta, grad)
    assert torch.allclose(found, grad - 0.3 * force, rtol=1e-10)


def test_the_last_rung_is_svgd_with_the_cosine_kernel():
    theta, grad = heads()
    found = CosineLadder(0.1, 0.3, rung="smoothing").gradient(theta, grad)
    assert torch.equal(found, SVGD(0.1, 0.3, kernel="cosine").gradient(theta, grad))


@pytest.mark.parametrize("rung", ["regulariser", "derivative", "smoothing"])
def test_every_rung_makes_heads_less_similar(rung):
    theta, grad = heads()
    step = CosineLadder(1.0, 1.0, rung=rung).gradient(theta, torch.zeros_like(grad))
    assert mean_cosine(theta - 0.05 * step) < mean_cosine(theta) - 1e-4


def test_the_printed_sign_would_attract():
    """The appendix adds the gradient of the similarity by the head itself, which makes heads more similar."""
    theta, grad = heads()
    printed = -CosineLadder(1.0, 1.0).gradient(theta, torch.zeros_like(grad))
    assert mean_cosine(theta - 0.05 * printed) > mean_cosine(theta)
