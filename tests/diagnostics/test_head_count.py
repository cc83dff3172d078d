"""Fit of the error over numbers of heads: known answers, constraints on signs, and optimality."""

import doctest
import math

import pytest
import torch

from repulsive.diagnostics import head_count
from repulsive.diagnostics.head_count import HeadCount, HeadFit, fit_heads


def measured(curve, heads=(1, 2, 4, 8, 16, 32), noise=0.0, seeds=3) -> list[HeadCount]:
    make = torch.Generator().manual_seed(0)
    return [
        HeadCount(m, tuple(curve(m) + noise * float(torch.randn((), generator=make)) for _ in range(seeds)))
        for m in heads
    ]


def squares(points: list[HeadCount], fit: HeadFit) -> float:
    return sum((fit.at(p.heads) - error) ** 2 for p in points for error in p.errors)


def test_the_example_in_the_docstring_runs():
    result = doctest.testmod(head_count)
    assert result.attempted and not result.failed


def test_exact_curve_is_recovered():
    fit = fit_heads(measured(lambda m: 3 / math.sqrt(m) + 0.02 * m + 40))
    assert (fit.a, fit.b, fit.c) == pytest.approx((3, 0.02, 40))
    assert fit.best == pytest.approx((3 / 0.04) ** (2 / 3))
    assert all(fit.at(fit.best) < fit.at(m) for m in (fit.best - 1, fit.best + 1))


@pytest.mark.parametrize(
    ("curve", "zero"),
    [
        (lambda m: 50 - 4 / math.sqrt(m), "a"),  # increasing, as with a negative a: only b may explain it
        (lambda m: 2 / math.sqrt(m) - 0.05 * m, "b"),
        (lambda m: 7.0, "both"),
    ],
)
def test_a_and_b_are_not_negative(curve, zero):
    fit = fit_heads(measured(curve))
    assert fit.a >= 0 and fit.b >= 0 and fit.best is None
    assert zero != "a" or (fit.a == 0 and fit.b > 0)
    assert zero != "b" or (fit.b == 0 and fit.a > 0)
    assert zero != "both" or (fit.a, fit.b, fit.c) == pytest.approx((0, 0, 7))


@pytest.mark.parametrize("seed", range(4))
def test_no_other_curve_has_a_smaller_squared_error(seed):
    make = torch.Generator().manual_seed(seed)
    a, b = (3 * torch.rand(2, generator=make)).tolist()
    points = measured(lambda m: a / math.sqrt(m) + 0.05 * b * m, noise=0.5)
    fit = fit_heads(points)
    least = squares(points, fit)
    for _ in range(300):
        da, db, dc = (torch.randn(3, generator=make) * torch.tensor([0.3, 0.02, 0.3])).tolist()
        other = HeadFit(max(0.0, fit.a + da), max(0.0, fit.b + db), fit.c + dc)
        assert squares(points, other) >= least - 1e-9


def test_every_run_has_the_same_weight():
    few = [HeadCount(1, (1.0,)), HeadCount(4, (0.0,)), HeadCount(9, (0.0, 0.0, 2.0)), HeadCount(16, (1.0,))]
    spread = [HeadCount(p.heads, (error,)) for p in few for error in p.errors]
    one, other = fit_heads(few), fit_heads(spread)
    assert (one.a, one.b, one.c) == pytest.approx((other.a, other.b, other.c))


def test_intervals_use_students_t():
    half = 4.302652729749 / math.sqrt(3)  # 97.5 % point of two degrees of freedom
    assert HeadCount(2, (1.0, 2.0, 3.0)).interval == pytest.approx((2 - half, 2 + half))
    assert HeadCount(2, (1.0,)).interval is None
    many = HeadCount(2, tuple(float(i % 2) for i in range(100)))
    assert many.interval[1] - many.mean == pytest.approx(1.984217 * 0.502519 / 10, rel=1e-5)


def test_two_numbers_of_heads_are_refused():
    with pytest.raises(ValueError, match="three different"):
        fit_heads([HeadCount(1, (0.1,)), HeadCount(1, (0.2,)), HeadCount(2, (0.1,))])
