"""Turns of twins: their times, their order, and the comparison of twins over many rounds.

The handle of `repel` measures its groups in one of `measure_every` steps, 50 by default, and such a step costs more. A
turn of a few steps would contain too many of them or none. So each turn has exactly one measuring step, which is timed
separately, and several ordinary ones; the seconds of an average step are (1 x measuring + 49 x ordinary) / 50. Plain
twins are timed in the same way: their first step counts for 1/50 and the others for 49/50.

Every round gives each twin one turn. The ratio of a twin is the geometric mean over rounds of its seconds over those of
the plain twin in the same round, so that slow drift of the machine cancels. Its 95 % interval is by Student's t, of the
mean log ratio.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from repulsive.lab.bench.clock import undisturbed
from repulsive.metrics import student
from repulsive.repulsion.settings import Settings

PERIOD = Settings().measure_every  # with default settings, one of this many steps measures
PLAIN = "plain"  # the twin that all others are compared with


@dataclass(frozen=True)
class Turn:
    """Times of one turn of a twin.

    Args:
        measuring: seconds of its first step, in which the handle measures.
        ordinary: mean seconds of the other steps.

    Example:
        >>> Turn(measuring=3.0, ordinary=2.0).seconds
        2.02
    """

    measuring: float
    ordinary: float

    @property
    def seconds(self) -> float:
        """Seconds of an average training step, if one of `PERIOD` steps measures."""
        return (self.measuring + (PERIOD - 1) * self.ordinary) / PERIOD


@dataclass(frozen=True)
class Cost:
    """Step time of one twin relative to the plain twin.

    Args:
        seconds: median over rounds of the seconds of its average step.
        ratio: geometric mean over rounds of its seconds over the plain twin's.
        low: lower end of the 95 % interval of `ratio`.
        high: upper end of the interval of `ratio`.
        median_ratio: median over rounds, which is robust against disturbed rounds.
    """

    seconds: float
    ratio: float
    low: float
    high: float
    median_ratio: float


def compare_turns(turns: Mapping[str, Sequence[Turn]]) -> dict[str, Cost]:
    """Compare every twin with the plain one, round by round.

    Args:
        turns: name -> turns in the order of rounds, at least two of them.

    Raises:
        ValueError: there are fewer than two rounds.

    Example:
        >>> plain, repelled = [Turn(2.0, 2.0)] * 3, [Turn(3.0, 3.0)] * 3
        >>> round(compare_turns({"plain": plain, "paper": repelled})["paper"].ratio, 6)
        1.5
    """
    base = [turn.seconds for turn in turns[PLAIN]]
    costs = {}
    for name, own in turns.items():
        seconds = [turn.seconds for turn in own]
        logs = [math.log(mine / plain) for mine, plain in zip(seconds, base, strict=True)]
        interval = student.interval(logs)
        if interval is None:
            raise ValueError(f"an interval needs at least two rounds, got {len(logs)}")
        numbers = (statistics.fmean(logs), *interval, statistics.median(logs))
        costs[name] = Cost(statistics.median(seconds), *map(math.exp, numbers))
    return costs


def order_of_round(names: Sequence[str], number: int) -> list[str]:
    """Return the order of turns in a round: reversed in every second round, and rotated every two rounds."""
    shift = number // 2 % len(names)
    order = [*names[shift:], *names[:shift]]
    return order[::-1] if number % 2 else order


def take_turns(
    turns: Mapping[str, Callable[[], Turn]], rounds: int, after_round: Callable[[int], None] = lambda number: None
) -> dict[str, list[Turn]]:
    """Give every twin one turn per round.

    Args:
        turns: name -> function that takes one turn of a twin.
        rounds: number of rounds.
        after_round: called with the number of finished rounds.
    """
    taken: dict[str, list[Turn]] = {name: [] for name in turns}
    with undisturbed():
        for number in range(rounds):
            for name in order_of_round(list(turns), number):
                taken[name].append(turns[name]())
            after_round(number + 1)
    return taken
