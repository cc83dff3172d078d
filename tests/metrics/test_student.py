"""Student's t against numerical integration of its density."""

import math
import statistics

import pytest
import torch

from repulsive.metrics.student import half_width, interval, quantile


def inside(t, degrees):
    """P(|T| <= t) by Simpson's rule over the density."""
    x = torch.linspace(0, t, 20_001, dtype=torch.float64)
    density = (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
    weights = torch.full_like(x, 2.0)
    weights[1::2], weights[0], weights[-1] = 4, 1, 1
    scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    return 2 * math.exp(scale) * float((density * weights).sum()) * t / 20_000 / 3


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 6, 9, 10, 31, 100])
@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.99])
def test_the_quantile_has_the_given_probability(level, degrees):
    assert inside(quantile(level, degrees), degrees) == pytest.approx(level, abs=1e-9)


def test_many_degrees_of_freedom_give_the_normal_distribution():
    assert quantile(0.95, 100_000) == pytest.approx(statistics.NormalDist().inv_cdf(0.975), abs=1e-4)


def test_half_width_by_hand():
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.302652729749 / 3**0.5)
    assert half_width([5.0, 5.0]) == 0


@pytest.mark.parametrize(("level", "degrees"), [(0.0, 3), (1.0, 3), (95, 3), (0.95, 0)])
def test_wrong_arguments_are_refused(level, degrees):
    with pytest.raises(ValueError, match="must lie between 0 and 1"):
        quantile(level, degrees)


def test_interval_by_hand():
    low, high = interval([1.0, 2.0, 3.0])
    assert (low, high) == (pytest.approx(2 - 4.303 / 3**0.5, abs=1e-3), pytest.approx(2 + 4.303 / 3**0.5, abs=1e-3))
    assert interval([1.0]) is None and interval([]) is None
