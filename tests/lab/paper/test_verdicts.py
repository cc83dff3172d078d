"""Verdicts follow from intervals; differences agree with a brute-force mean."""

import json

import pytest
import torch

from repulsive.lab.engine.run_reader import RECIPE
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.paper.differences import difference, over_seeds
from repulsive.lab.paper.figure3_head_counts import least_certain, negated
from repulsive.lab.paper.mismatch import OTHER, SMALLER, Mismatch
from repulsive.lab.paper.published import Claim
from repulsive.lab.paper.verdicts import (
    CONFIRMED,
    FAILS,
    HOLDS,
    NOT_CONFIRMED,
    NOT_TESTED,
    OUTCOMES,
    UNDECIDED,
    decide,
    decide_limit,
    judge,
    judge_unseen,
)
from repulsive.metrics.compare import Comparison

CLAIM = Claim("table1", "SVGD beats MA", "here", "yelp", "svgd", "ma", "accuracy")


def seen(low, high, p=0.01, over="both", seeds=8):
    return Comparison((low + high) / 2, low, high, p, over, seeds, 100)


@pytest.mark.parametrize(
    ("better", "found", "verdict"),
    [
        ("higher", seen(0.1, 0.5), CONFIRMED),
        ("higher", seen(-0.1, 0.5), NOT_CONFIRMED),
        ("higher", seen(-0.5, -0.1), NOT_CONFIRMED),
        ("higher", seen(0.1, 0.5, p=0.06), NOT_CONFIRMED),
        ("higher", seen(0.1, 0.5, p=float("nan")), CONFIRMED),
        ("lower", seen(-0.5, -0.1), CONFIRMED),
        ("lower", seen(0.1, 0.5), NOT_CONFIRMED),
        ("same", seen(-0.2, 0.9), CONFIRMED),
        ("same", seen(0.1, 0.9), CONFIRMED),
        ("same", seen(-0.2, 1.1), NOT_CONFIRMED),
        ("same", seen(-1.2, 0.1), NOT_CONFIRMED),
    ],
)
def test_the_interval_decides_the_verdict(better, found, verdict):
    claim = Claim("t", "", "", "yelp", "a", "b", "m", better, 1.0 if better == "same" else 0.0)
    assert judge(claim, found, None).verdict == verdict
    toy = judge(claim, found, Mismatch("toy data"))
    assert (toy.verdict, toy.reason) == (NOT_TESTED, "toy data")


@pytest.mark.parametrize(
    ("gain", "low", "high", "options", "outcome"),
    [
        (0.8, 0.1, 2.0, {}, HOLDS),
        (0.8, 0.1, 0.5, {}, HOLDS),  # a gain, though not the paper's amount
        (0.8, 0.1, 0.5, {"p_value": 0.25}, UNDECIDED),  # too few seeds for the test
        (0.8, -1.0, 0.5, {}, FAILS),
        (0.8, -1.0, 0.5, {"p_value": 0.25}, FAILS),  # the interval excludes the paper's gain
        (0.8, -1.0, 0.9, {}, UNDECIDED),
        (-0.5, -2.0, -0.1, {}, FAILS),  # the paper's own number contradicts its claim
        (-0.5, -2.0, 0.1, {}, UNDECIDED),
        (None, -2.0, -1.0, {}, FAILS),
        (None, -2.0, 1.0, {}, UNDECIDED),
        (None, -2.0, -1.0, {"better": "lower"}, HOLDS),
        (None, -2.0, 1.0, {"better": "lower"}, UNDECIDED),
        (-3.0, -2.0, 1.0, {"better": "lower"}, FAILS),
        (0.1, -0.4, 0.5, {"better": "same", "within": 0.5}, HOLDS),
        (0.1, -0.4, 0.6, {"better": "same", "within": 0.5}, UNDECIDED),
        (0.1, 0.6, 0.9, {"better": "same", "within": 0.5}, FAILS),
        (0.1, -0.9, -0.6, {"better": "same", "within": 0.5}, FAILS),
    ],
)
def test_the_rule_for_smaller_and_other_data(gain, low, high, options, outcome):
    assert decide(low, high, gain, **options) == outcome
    claim = Claim("t", "", "", "d", "a", "b", "m", options.get("better", "higher"), options.get("within", 0), gain=gain)
    for kind in (SMALLER, OTHER):
        found = judge(claim, seen(low, high, options.get("p_value", 0.01)), Mismatch("why", kind))
        assert found.outcome == outcome and found.outcome in OUTCOMES
        assert found.verdict == (outcome if outcome == UNDECIDED else f"same claim, {kind}: {outcome}")


def test_limits():
    assert [decide_limit(*ends, 1.0) for ends in ((0.1, 0.9), (1.1, 1.3), (0.9, 1.1))] == [HOLDS, FAILS, UNDECIDED]


def test_other_data_confirm_nothing_but_report_the_difference():
    found = judge(CLAIM, seen(0.1, 0.5), Mismatch("webnlg instead of agenda", OTHER))
    assert (found.verdict, found.observed) == ("same claim, other data: holds", "higher")
    assert found.reason == "webnlg instead of agenda; p = 0.010"


def test_one_seed_on_other_data_decides_nothing():
    found = judge(CLAIM, seen(0.1, 0.5, 1e-4, "items", 1), Mismatch("less", SMALLER))
    assert found.verdict == UNDECIDED and "only one seed" in found.reason


def test_a_claim_without_a_difference_to_compute():
    reason = "1 head is best, at that end of the curve"
    assert judge_unseen(CLAIM, None, reason).verdict == NOT_CONFIRMED
    assert judge_unseen(CLAIM, Mismatch("less", SMALLER), reason).verdict == UNDECIDED
    assert judge_unseen(CLAIM, Mismatch("toy data"), reason).verdict == NOT_TESTED


def test_nothing_to_compare_is_not_tested():
    assert judge(CLAIM, None, None, "SPOS not run").reason == "SPOS not run"
    assert judge(CLAIM, None, None).verdict == NOT_TESTED


def test_one_seed_confirms_nothing_however_many_items():
    assert judge(CLAIM, seen(0.1, 0.5, 1e-4, "items", 1), None).verdict == NOT_CONFIRMED


def test_too_few_seeds_are_the_reason():
    found = judge(CLAIM, seen(0.1, 0.5, 0.25, "both", 3), None)
    assert found.verdict == NOT_CONFIRMED and "0.25" in found.reason


def run(folder, seed, correct, **metrics):
    """Write a finished run with these predictions."""
    path = folder / f"seed-{seed}"
    path.mkdir(parents=True)
    (path / RECIPE).write_text(json.dumps({"seed": seed}))
    right = torch.tensor(correct, dtype=torch.float64)
    items = {"correct": right.bool(), "labels": torch.arange(len(correct)), "nll": 1 - right}
    RunFolder(path).finish({"test": {"accuracy": float(right.mean()), **metrics}}, {"test": items})
    return RunFolder(path)


def test_a_difference_is_paired_by_seed_and_item_and_in_percent(tmp_path):
    draw = torch.Generator().manual_seed(0)
    right = {"a": 0.9, "b": 0.4}
    answers = {m: [(torch.rand(50, generator=draw) < p).long().tolist() for _ in range(8)] for m, p in right.items()}
    first, second = ({seed: run(tmp_path / m, seed, each) for seed, each in enumerate(answers[m])} for m in ("a", "b"))
    found = difference(first, second, "accuracy")
    by_hand = 100 * (sum(map(sum, answers["a"])) - sum(map(sum, answers["b"]))) / (8 * 50)
    assert found is not None and found.difference == pytest.approx(by_hand)
    assert (found.over, found.seeds, found.items) == ("both", 8, 50)
    assert judge(CLAIM, found, None).verdict == CONFIRMED
    turned = difference(second, first, "accuracy")
    assert turned is not None and judge(CLAIM, turned, None).verdict == NOT_CONFIRMED


def test_numbers_without_items_are_compared_over_seeds(tmp_path):
    first = {seed: run(tmp_path / "a", seed, [1, 0], dist=2.0 + seed) for seed in range(8)}
    second = {seed: run(tmp_path / "b", seed, [1, 0], dist=1.0 + seed) for seed in range(1, 9)}
    found = difference(first, second, "dist")
    assert found is not None and (found.difference, found.seeds, found.over) == (pytest.approx(1.0), 7, "seeds")
    assert difference({0: first[0]}, {0: run(tmp_path / "c", 0, [1, 0], dist=0.0)}, "dist") is None
    assert difference(first, second, "METEOR") is None


def test_over_seeds_pairs_by_seed():
    found = over_seeds({0: 1.0, 1: 5.0, 7: 9.0}, {1: 4.0, 0: 0.5})
    assert found is not None and found.difference == pytest.approx(0.75)


def test_the_least_certain_number_of_heads_decides():
    good, bad = seen(-2.0, -1.0, 0.01), seen(-0.5, 0.1, 0.3)
    worst = least_certain([good, bad, good])
    assert worst is not None and (worst.high, worst.p_value) == (0.1, 0.3)
    assert least_certain([good, None]) is None and least_certain([]) is None


def test_negated_swaps_the_ends_of_the_interval():
    turned = negated(seen(1.0, 3.0))
    assert (turned.difference, turned.low, turned.high) == (-2.0, -3.0, -1.0)
