"""Paired comparison: exact small cases, error rates on simulations, and the variation that each test includes."""

import pytest
import torch

from repulsive.metrics.compare import compare, compare_totals


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def test_all_sign_flips_by_hand():
    result = compare(torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3))
    assert result.difference == pytest.approx(2)
    assert result.p_value == 2 / 8  # only +++ and --- reach |2|
    assert compare(torch.tensor([1.0, -2.0, 1.0]), torch.zeros(3)).p_value == 1
    assert compare(torch.tensor([3.0, 2.0, -1.0]), torch.zeros(3)).p_value == 4 / 8  # sums 4 and 6, either sign


def test_no_difference_and_a_clear_one():
    x = normal(3, 400)
    same = compare(x, x)
    assert (same.difference, same.low, same.high, same.p_value) == (0, 0, 0, 1)
    assert compare(x, normal(3, 400, seed=1), resamples=2000).p_value > 0.05
    clear = compare(x + 0.5, x + 0.1 * normal(3, 400, seed=1), resamples=2000)
    assert clear.p_value == pytest.approx(1 / 2001)
    assert clear.low > 0.4 and clear.high < 0.6


def test_the_interval_is_the_normal_one_for_many_items():
    d = normal(500) + 0.1
    result = compare(d, torch.zeros(500))
    half = 1.96 * d.std().item() / 500**0.5
    assert result.low == pytest.approx(d.mean().item() - half, abs=0.1 * half)
    assert result.high == pytest.approx(d.mean().item() + half, abs=0.1 * half)


def test_swapping_the_systems_reverses_the_result():
    a, b = normal(2, 60) + 0.2, normal(2, 60, seed=1)
    there, back = compare(a, b), compare(b, a)
    assert back.difference == pytest.approx(-there.difference)
    assert back.low == pytest.approx(-there.high) and back.high == pytest.approx(-there.low)
    assert back.p_value == there.p_value


def test_the_same_seed_gives_the_same_result():
    a, b = normal(2, 60) + 0.2, normal(2, 60, seed=1)
    assert compare(a, b, seed=3) == compare(a, b, seed=3)
    assert compare(a, b, seed=3) != compare(a, b, seed=4)


@pytest.mark.parametrize("over", ["items", "seeds"])
def test_error_rates_on_a_simulation(over):
    trials, covered, rejected = 200, 0, 0
    for trial in range(trials):
        d = normal(40, seed=trial) + 0.3
        d = d.unsqueeze(1 if over == "seeds" else 0)
        result = compare(d, torch.zeros_like(d), over, resamples=400, seed=trial)
        covered += result.low <= 0.3 <= result.high
        null = compare(d, torch.full_like(d, 0.3), over, resamples=400, seed=trial)
        rejected += null.p_value <= 0.05
    assert 0.88 <= covered / trials <= 0.98  # 0.95 with a standard error of 0.015; bootstrap intervals are short
    assert 0.01 <= rejected / trials <= 0.10  # 0.05


@pytest.mark.parametrize(("over", "seeds"), [("seeds", 2), ("seeds", 3), ("both", 3)])
def test_intervals_of_few_seeds_have_nominal_coverage(over, seeds):
    """A bootstrap of the seeds would cover the true mean in 50, 75 and 78 % of cases."""
    trials, covered = 300, 0
    for trial in range(trials):
        run, item = normal(seeds, 1, seed=trial), normal(1, 50, seed=trials + trial)
        d = run + item + normal(seeds, 50, seed=2 * trials + trial)
        result = compare(d + 0.3, torch.zeros_like(d), over, resamples=400, seed=trial)
        truth = 0.3 + (item.mean().item() if over == "seeds" else 0)  # over seeds the items are fixed
        covered += result.low <= truth <= result.high
    assert 0.92 <= covered / trials <= 0.985  # 0.95 with a standard error of 0.013


def test_the_interval_over_seeds_is_students():
    d = torch.tensor([[0.2, 0.4], [0.0, 0.2], [0.8, 1.4]]).double()  # means 0.3, 0.1 and 1.1, deviation 0.52915
    result = compare(d, torch.zeros_like(d), "seeds")
    half = 4.302652729749 * 0.529150262213 / 3**0.5
    assert (result.low, result.high) == pytest.approx((0.5 - half, 0.5 + half))
    wider = compare(d, torch.zeros_like(d), "seeds", level=0.99)
    assert wider.high - wider.low == pytest.approx(2 * half * 9.924843200918 / 4.302652729749)


def test_the_interval_over_both_adds_half_widths_in_quadrature():
    d = normal(3, 80) + normal(3, 1, seed=1) + 0.1
    over = {kind: compare(d, torch.zeros_like(d), kind) for kind in ("items", "seeds", "both")}
    for end in ("low", "high"):
        ends = {kind: abs(getattr(result, end) - result.difference) for kind, result in over.items()}
        assert ends["both"] == pytest.approx((ends["items"] ** 2 + ends["seeds"] ** 2) ** 0.5)


def test_variation_between_seeds_matters_only_if_seeds_are_resampled():
    offsets = torch.tensor([1.0, -0.6, 0.9, -0.7, 0.8]).double().unsqueeze(1)  # mean 0.28, not significant
    a, b = offsets + 0.1 * normal(5, 300), torch.zeros(5, 300)
    over = {kind: compare(a, b, kind, resamples=2000) for kind in ("items", "seeds", "both")}
    assert over["items"].p_value < 0.001 and over["items"].low > 0
    assert over["seeds"].p_value > 0.3 and over["seeds"].low < 0 < over["seeds"].high
    assert over["both"].p_value == over["seeds"].p_value
    assert over["both"].high - over["both"].low == pytest.approx(over["seeds"].high - over["seeds"].low, rel=0.1)


def test_the_smallest_p_value_depends_on_the_number_of_seeds():
    a = torch.ones(4, 10) + 0.01 * normal(4, 10)
    assert compare(a, torch.zeros(4, 10), "seeds").p_value == 2 ** (1 - 4)


def test_the_observed_assignment_counts_as_one_of_the_random_swaps():
    """No p-value is 0: with R random swaps it is at least 1 / (1 + R)."""
    first, second = torch.ones(40, 1), torch.zeros(40, 1)
    assert compare_totals(first, second, lambda totals: totals[..., 0], resamples=99).p_value == 1 / 100


def test_wrong_arguments_are_refused():
    x = torch.zeros(2, 5)
    with pytest.raises(ValueError, match="over='rows'"):
        compare(x, x, "rows")
    with pytest.raises(ValueError, match=r"\[2, 5\] and \[2, 4\]"):
        compare(x, x[:, :4])
    with pytest.raises(ValueError, match="1 seeds"):
        compare(x[0], x[0], "both")
    with pytest.raises(ValueError, match="1 test items"):
        compare(x[:, :1], x[:, :1])
    with pytest.raises(ValueError, match="infinite"):
        compare(x, x.log())
    with pytest.raises(ValueError, match="level"):
        compare(x, x, level=95)


def test_one_seed_is_printed_in_the_singular():
    x = torch.rand(1, 20)
    assert str(compare(x, x + 0.1)).endswith("(1 seed x 20 items)")


def test_systems_that_tie_exactly_do_not_differ():
    """Rounding makes the mean difference 1e-18 instead of 0; every flip must count as a tie."""
    wins = [3, -3, 1, 0, -1, 0]
    first, second = torch.zeros(6, 300), torch.zeros(6, 300)
    for seed, more in enumerate(wins):
        first[seed, : max(more, 0)] = 1
        second[seed, : max(-more, 0)] = 1
    assert compare(first, second, "seeds").p_value == 1.0
