"""Timing and comparison of turns, with a fake clock."""

import math

import pytest
import torch

from repulsive.lab.bench import clock
from repulsive.lab.bench.turns import PERIOD, Turn, compare_turns, order_of_round, take_turns
from tests.lab.bench.tiny_models import tiny_twin


class FakeClock:
    """Time that passes only when the test advances it."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(clock.time, "perf_counter", lambda: self.now)

    def spend(self, seconds):
        self.now += seconds


def test_a_turn_counts_measuring_steps_as_one_of_fifty(monkeypatch):
    pytest.importorskip("transformers")
    fake = FakeClock(monkeypatch)
    twin = tiny_twin("llama", steps=4)
    costs = iter([3.0, 1.0, 1.0, 2.0, 2.0])
    monkeypatch.setattr(twin, "step", lambda: fake.spend(next(costs)))
    turn = twin.turn()
    assert turn == Turn(measuring=3.0, ordinary=1.5) and PERIOD == 50
    assert turn.seconds == pytest.approx((3.0 + 49 * 1.5) / 50)


def test_a_machine_that_slows_down_does_not_change_ratios(monkeypatch):
    """Each round is 10 % slower than the one before; one twin always takes 1.02 of the other."""
    fake, speed = FakeClock(monkeypatch), [1.0]

    def twin(factor):
        def turn():
            seconds = clock.laps([lambda: fake.spend(factor * speed[0])] * 2, torch.device("cpu"))
            return Turn(*seconds)

        return turn

    def slow_down(done):
        speed[0] *= 1.1

    turns = take_turns({"plain": twin(1.0), "plain again": twin(1.0), "paper": twin(1.02)}, 8, slow_down)
    costs = compare_turns(turns)
    for end in ("ratio", "low", "high", "median_ratio"):
        assert getattr(costs["plain again"], end) == pytest.approx(1.0, rel=1e-9)
        assert getattr(costs["paper"], end) == pytest.approx(1.02, rel=1e-9)
    assert costs["plain"].seconds == pytest.approx(1.1**3.5, rel=0.01)


def test_the_interval_is_students_of_log_ratios():
    ratios = [1.01, 1.02, 1.04]
    plain = [Turn(1.0, 1.0)] * 3
    cost = compare_turns({"plain": plain, "paper": [Turn(ratio, ratio) for ratio in ratios]})["paper"]
    logs = [math.log(ratio) for ratio in ratios]
    mean = sum(logs) / 3
    deviation = math.sqrt(sum((log - mean) ** 2 for log in logs) / 2)
    assert cost.ratio == pytest.approx(math.exp(mean)) and cost.median_ratio == pytest.approx(1.02)
    assert cost.high == pytest.approx(math.exp(mean + 4.3027 * deviation / math.sqrt(3)), rel=1e-4)
    with pytest.raises(ValueError, match="at least two rounds, got 1"):
        compare_turns({"plain": plain[:1]})


def test_every_twin_has_every_place_in_the_order_equally_often():
    names = ["a", "b", "c"]
    orders = [order_of_round(names, number) for number in range(6)]
    assert orders[:2] == [["a", "b", "c"], ["c", "b", "a"]]
    assert all(sorted(order[place] for order in orders) == sorted(2 * names) for place in range(3))
