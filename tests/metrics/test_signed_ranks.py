"""Signed-rank intervals against the enumeration of all signs."""

import itertools
import random
import statistics

import pytest

from repulsive.metrics import signed_ranks
from repulsive.metrics.signed_ranks import hodges_lehmann, interval, least_count


def largest_cut(count, level):
    """The largest k with P(T < k) <= (1 - level) / 2, where T is counted over all 2^count signs of the ranks."""
    sums = [
        sum(rank for rank, positive in enumerate(signs, start=1) if positive)
        for signs in itertools.product((False, True), repeat=count)
    ]
    return max(k for k in range(len(sums)) if sum(t < k for t in sums) <= (1 - level) / 2 * len(sums))


@pytest.mark.parametrize("count", [6, 7, 8, 10])
@pytest.mark.parametrize("level", [0.9, 0.95, 1 - 2 / 64])  # the last one is exact for some counts
def test_the_interval_ends_at_the_enumerated_order_statistics(count, level):
    source = random.Random(count)
    values = [source.gauss(0, 1) for _ in range(count)]
    averages = sorted((a + b) / 2 for a, b in itertools.combinations_with_replacement(values, 2))
    cut = largest_cut(count, level)
    assert interval(values, level) == (averages[cut - 1], averages[-cut])
    assert hodges_lehmann(values) == pytest.approx(statistics.median(averages))


def test_fewer_than_six_numbers_have_no_interval_of_95_percent():
    assert least_count(0.95) == 6 and least_count(0.99) == 8
    for count in range(9):
        for level in (0.95, 0.99):
            assert (interval(range(count), level) is None) == (count < least_count(level))


def test_the_normal_approximation_agrees_with_the_exact_distribution(monkeypatch):
    exact = [signed_ranks._left_out(count, 0.95) for count in (20, 40, 60, 100)]
    monkeypatch.setattr(signed_ranks, "MOST_EXACT", 0)
    normal = [signed_ranks._left_out(count, 0.95) for count in (20, 40, 60, 100)]
    assert all(abs(a - b) <= 1 for a, b in zip(exact, normal, strict=True))
    assert exact[:2] == [53, 265]  # published tables: T <= 52 and T <= 264 are significant


def test_95_percent_of_intervals_contain_the_centre():
    source = random.Random(0)
    hits = 0
    for _ in range(400):
        low, high = interval([source.gauss(3, 1) for _ in range(12)])
        hits += low <= 3 <= high
    assert 0.92 <= hits / 400 <= 0.99


def test_outliers_hardly_matter():
    values = [1.0 + 0.001 * n for n in range(20)]
    disturbed = [*values[:-2], 50.0, 80.0]
    assert hodges_lehmann(disturbed) == pytest.approx(hodges_lehmann(values), abs=0.002)
    assert interval(disturbed)[1] < 1.03 and statistics.fmean(disturbed) > 7


def test_a_wrong_level_is_refused():
    with pytest.raises(ValueError, match="between 0 and 1"):
        interval([1.0] * 8, 95)
