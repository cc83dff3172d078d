"""Timing and comparison of turns, with a fake clock."""

import itertools
import math
import os
import random
import threading
from pathlib import Path

import pytest
import torch

from repulsive import SVGD
from repulsive.lab.bench import clock
from repulsive.lab.bench.rules import Case
from repulsive.lab.bench.training_variants import first_step
from repulsive.lab.bench.turns import LEAST_ROUNDS, TurnTimes, average, compare_turns, order_of_round, run_rounds
from repulsive.metrics import signed_ranks
from repulsive.repulsion.logits.renewal import is_renewed
from tests.lab.bench.tiny_models import tiny_variant

AGAINST = {"plain again": "plain", "paper": "plain"}


class FakeClock:
    """Time that passes only when the test advances it."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(clock.time, "perf_counter", lambda: self.now)

    def spend(self, seconds):
        self.now += seconds


def fake_turns(fake, speed, **factors):
    """Turns whose steps take their factor times the speed of the machine at that time."""

    def variant(factor):
        def turn():
            return TurnTimes(*clock.time_each([lambda: fake.spend(factor * speed(fake.now))] * 2, torch.device("cpu")))

        return turn

    return {name.replace("_", " "): variant(factor) for name, factor in factors.items()}


def test_a_turn_counts_measuring_steps_as_one_of_fifty(monkeypatch):
    pytest.importorskip("transformers")
    fake = FakeClock(monkeypatch)
    variant = tiny_variant("llama", steps=4)
    costs = iter([3.0, 1.0, 1.0, 2.0, 2.0])
    monkeypatch.setattr(variant, "step", lambda: fake.spend(next(costs)))
    turn = variant.run_turn()
    assert turn == TurnTimes(measuring=3.0, ordinary=1.5)
    assert turn.seconds == pytest.approx((3.0 + 49 * 1.5) / 50)


def test_a_turn_counts_renewing_steps_as_often_as_a_training_has_them(monkeypatch):
    pytest.importorskip("transformers")
    fake = FakeClock(monkeypatch)
    variant = tiny_variant("llama", Case(SVGD(space="logits")))
    costs = iter([3.0, 7.0, 1.0, 2.0])
    monkeypatch.setattr(variant, "step", lambda: fake.spend(next(costs)))
    turn = variant.run_turn()
    assert turn == TurnTimes(measuring=3.0, ordinary=1.5, renewing=7.0, renewals=346)
    assert turn.seconds == pytest.approx((200 * 3 + 346 * 7 + (10_000 - 546) * 1.5) / 10_000)


def test_an_average_step_of_a_rule_that_is_switched_off():
    """500 steps with the rule, of which ten measure and 180 renew, and 9,500 without."""
    turn = TurnTimes(measuring=3.0, ordinary=2.0, renewing=5.0, renewals=180, off=1.0, active=500)
    assert turn.seconds == pytest.approx((10 * 3 + 180 * 5 + 310 * 2 + 9500) / 10_000)


def test_the_first_step_measures_and_the_second_renews():
    step = first_step("auto", 2)
    assert [is_renewed(step + shift, "auto") for shift in range(4)] == [False, True, False, False]
    assert first_step(10, 2) == 9 and first_step(10, 2, act_every=4) == 16
    assert first_step(1, 2) is None


class Counter:
    """The part of a handle that a turn uses."""

    def __init__(self, measure_every):
        self.steps, self.measure_every, self.is_attached = 0, measure_every, False  # as a new handle

    def attach(self):
        self.is_attached = True

    def remove(self):
        self.is_attached = False


def costs_of_steps(steps, act_every, measure_every, every):
    """Costs of a training, step by step; a renewal that is due while the rule rests waits until it acts."""
    costs, is_due = [], False
    for step in steps:
        is_due = is_due or (every is not None and is_renewed(step, every))
        cost = 1.0
        if step % act_every == 0:
            cost += 2.0 + 8.0 * (step % measure_every < act_every) + 16.0 * is_due
            is_due = False
        costs.append(cost)
    return costs


@pytest.mark.parametrize("act_every", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("every", [None, "auto", 1, 3, 10, 200])
def test_an_average_step_weights_acting_and_resting_steps_as_a_training_does(monkeypatch, act_every, every):
    """The mean of turns is that of 10,000 steps, each counted."""
    pytest.importorskip("transformers")
    rule = SVGD() if every is None else SVGD(space="logits", every=every)
    object.__setattr__(rule, "act_every", act_every)
    variant = tiny_variant("llama", Case(rule), steps=4)
    counter = variant.handle = Counter(variant.handle.settings.measure_every)
    costs = costs_of_steps(range(10_000), act_every, counter.measure_every, every)
    fake = FakeClock(monkeypatch)
    measured = []

    def step():
        assert counter.is_attached
        measured.append(counter.steps % act_every == 0 and counter.steps % counter.measure_every < act_every)
        fake.spend(costs[counter.steps])
        counter.steps += 1

    monkeypatch.setattr(variant, "step", step)
    turns = []
    for _ in range(10):
        measured.clear()
        turns.append(variant.run_turn())
        assert measured == [True, *[False] * (len(measured) - 1)] and not counter.is_attached
        assert len(measured) == act_every * len(variant.periods) and variant.ordinary * act_every >= 4
    expected = costs_of_steps(range(10_000), act_every, 50, every)
    found = sum(turn.seconds for turn in turns) / len(turns)
    assert found == pytest.approx(sum(expected) / 10_000, rel=3e-3)


def test_with_one_step_per_period_nothing_changes():
    expected = (200 * 3.0 + 346 * 7.0 + (10_000 - 546) * 1.5) / 10_000
    assert average(3.0, 1.5, 7.0, 346) == pytest.approx(expected)
    assert average(3.0, 1.5, None, 346) == pytest.approx((200 * 3.0 + 9_800 * 1.5) / 10_000)


@pytest.mark.parametrize("factor", [1.005, 1.02, 1.3])
def test_steady_drift_cancels(monkeypatch, factor):
    """Each turn is slower than the one before by the same time; a comparison with one turn alone sees the drift."""
    fake, count = FakeClock(monkeypatch), itertools.count(0, 0.5)  # two laps per turn
    functions = fake_turns(fake, lambda now: 1 + 0.02 * int(next(count)), plain=1.0, plain_again=1.0, paper=factor)
    turns = run_rounds(functions, AGAINST, 6)
    costs = compare_turns(turns, AGAINST)
    for end in ("ratio", "low", "high", "geometric_mean", "median_ratio"):
        assert getattr(costs["paper"], end) == pytest.approx(factor, rel=1e-9)
        assert getattr(costs["plain again"], end) == pytest.approx(1.0, rel=1e-9)
    before = {turn.at: turn.seconds for turn in turns["plain"]}
    single = [turn.seconds / before[turn.at - 1] for turn in turns["paper"]]
    assert min(single) > 1.005 * factor


def test_half_a_percent_shows_on_a_machine_that_wanders(monkeypatch):
    """Speed changes slowly between 22 and 36 ms, as on a busy host, and one turn in ten is disturbed."""
    fake, source = FakeClock(monkeypatch), random.Random(0)

    def speed(now):
        return 0.029 * (1 + 0.2 * math.sin(now / 7)) * (1 + (source.random() if source.random() < 0.1 else 0))

    functions = fake_turns(fake, speed, plain=1.0, plain_again=1.0, paper=1.005)
    turns = run_rounds(functions, AGAINST, 60)
    costs = compare_turns(turns, AGAINST)
    assert costs["paper"].ratio == pytest.approx(1.005, abs=0.002)
    assert costs["plain again"].ratio == pytest.approx(1.0, abs=0.002)
    assert costs["paper"].high - costs["paper"].low < 0.005
    assert abs(costs["paper"].geometric_mean - 1.005) > 0.004, "the disturbed turns should change the mean"


def test_the_interval_is_wilcoxons_of_log_ratios():
    ratios = [1.01, 1.02, 1.04, 0.99, 1.03, 1.015, 1.5]
    plain = [TurnTimes(1.0, 1.0, at=2 * place) for place in range(len(ratios) + 1)]
    paper = [TurnTimes(ratio, ratio, at=2 * place + 1) for place, ratio in enumerate(ratios)]
    cost = compare_turns({"plain": plain, "paper": paper}, {"paper": "plain"})["paper"]
    logs = [math.log(ratio) for ratio in ratios]
    assert cost.ratio == pytest.approx(math.exp(signed_ranks.hodges_lehmann(logs)))
    assert (cost.low, cost.high) == pytest.approx([math.exp(end) for end in signed_ranks.interval(logs)])
    assert cost.geometric_mean == pytest.approx(math.exp(sum(logs) / 7)) and cost.median_ratio == pytest.approx(1.02)


def test_a_turn_is_compared_with_the_mean_of_the_plain_turns_around_it():
    turns = {
        "plain": [TurnTimes(s, s, at=2 * place) for place, s in enumerate([1.0, 3.0] * 3 + [1.0])],
        "paper": [TurnTimes(4.0, 4.0, at=2 * place + 1) for place in range(6)],
    }
    assert compare_turns(turns, {"paper": "plain"})["paper"].ratio == pytest.approx(2.0)
    with pytest.raises(ValueError, match="does not lie between two turns of plain"):
        compare_turns({"plain": turns["plain"][1:], "paper": turns["paper"]}, {"paper": "plain"})


def test_few_rounds_have_no_interval():
    turns = {"plain": [TurnTimes(1.0, 1.0, at=0), TurnTimes(1.0, 1.0, at=2)], "paper": [TurnTimes(1.0, 1.0, at=1)]}
    with pytest.raises(ValueError, match="at least 6 rounds, got 1"):
        compare_turns({**turns, "paper": [TurnTimes(2.0, 2.0, at=1)]}, {"paper": "plain"})


def test_every_variant_has_every_place_in_the_order_equally_often():
    against = dict.fromkeys("abc", "plain")
    orders = [order_of_round(against, number) for number in range(6)]
    assert orders[0] == ["plain", "a", "plain", "b", "plain", "c", "plain"]
    assert orders[1] == orders[0][::-1]
    assert all(sorted(order[place] for order in orders) == sorted(2 * "abc") for place in (1, 3, 5))


def test_a_variant_with_another_baseline_lies_between_its_turns():
    order = order_of_round({"a": "plain", "b": "clipped", "c": "plain"}, 0)
    assert order == ["plain", "a", "plain", "clipped", "b", "clipped", "plain", "c", "plain"]


def test_a_time_limit_ends_after_a_whole_round(monkeypatch):
    fake = FakeClock(monkeypatch)
    lines: list[str] = []
    for seconds, rounds in ((85.0, 9), (0.0, LEAST_ROUNDS), (1e6, 20)):
        functions = fake_turns(fake, lambda now: 1.0, plain=1.0, plain_again=1.0, paper=1.0)  # 10 s per round
        turns = run_rounds(functions, AGAINST, 20, seconds=seconds, progress=lines.append)
        assert len(turns["paper"]) == rounds and len(turns["plain"]) == 3 * rounds
    assert lines[0] == "round 1 of at most 20, about 75 s left"


def test_without_a_number_of_rounds_as_many_as_fit_are_taken(monkeypatch):
    fake = FakeClock(monkeypatch)
    functions = fake_turns(fake, lambda now: 1.0, plain=1.0, plain_again=1.0, paper=1.0)  # 10 s per round
    lines: list[str] = []
    turns = run_rounds(functions, AGAINST, seconds=1995.0, progress=lines.append)
    assert len(turns["paper"]) == 200
    assert lines[0] == "round 1, about 1985 s left" and lines[-1] == "round 200, about 0 s left"
    assert len(lines) == 11
    with pytest.raises(ValueError, match="expected a limit"):
        run_rounds(functions, AGAINST)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux")
def test_all_threads_run_on_one_core_for_a_while():
    ending = threading.Event()
    thread = threading.Thread(target=ending.wait)
    thread.start()
    threads, before = (threading.get_native_id(), thread.native_id), os.sched_getaffinity(0)
    try:
        with clock.one_core():
            assert [os.sched_getaffinity(own) for own in threads] == [{max(before)}] * 2
        assert [os.sched_getaffinity(own) for own in threads] == [before] * 2
    finally:
        ending.set()
        thread.join()
