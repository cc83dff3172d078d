"""The study of the error of SPOS: moments by a grid, the slope of U, and errors of known samples."""

import pytest
import torch

from tests.scripts import study


@pytest.fixture(scope="module")
def bound():
    with study("studies.bound.run") as module:
        yield module


def test_moments_are_those_of_the_mixture(bound):
    """0.6 N((-1.5, 0), I) + 0.4 N((1, 1), I): E x = -0.5, E y = 0.4, E x^2 = 1 + 0.6 * 2.25 + 0.4, E xy = 0.4."""
    mean, deviation = bound.moments(cells=301)
    assert mean[:5].tolist() == pytest.approx([-0.5, 0.4, 2.75, 1.4, 0.4], abs=1e-6)
    assert float(deviation[0]) == pytest.approx((2.75 - 0.25) ** 0.5, abs=1e-6)


def test_the_slope_is_the_gradient_of_u(bound):
    points = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(-bound.log_density(points).sum(), points)
    assert torch.allclose(bound.slope(points.detach()), slope)


def test_independent_samples_have_the_error_of_their_number(bound):
    source = torch.Generator().manual_seed(0)
    which = (torch.rand(400, 64, generator=source) < 0.4).long()
    noise = torch.randn(400, 64, 2, generator=source, dtype=torch.float64)
    errors = bound.squared_errors(bound.CENTRES[which] + noise, bound.moments(cells=301))
    assert float(errors.mean().sqrt()) == pytest.approx(64**-0.5, rel=0.1)


def test_more_particles_have_a_smaller_error(bound):
    truth = bound.moments(cells=301)
    few, many = (bound.measure(count, 0.2, 20.0, truth) for count in (8, 32))
    assert few["low"] > many["high"]
    assert few["error"] / many["error"] == pytest.approx(2, rel=0.3)


def test_log_slope(bound):
    assert bound.log_slope([1, 2, 4], [3.0, 6.0, 12.0]) == pytest.approx(1)
