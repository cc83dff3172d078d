"""Turns of twins: their times, their order, and the comparison of twins over many rounds.

Steps of a training differ. The handle of `repel` measures its groups in one of `measure_every` steps, 50 by default. A
rule with `space="logits"` renews its force in a few steps. Both cost more than an ordinary step, so each turn has one
step of each kind, timed separately, and a few ordinary ones. The seconds of an average step are those of a training of
10,000 steps, with 200 that measure, and 346 that renew if `every="auto"`. Plain twins are timed in the same way.

Each turn of a twin lies between two turns of the plain twin, and is compared with their mean. A turn is short, so that
slow drift of the machine cancels. The ratio of a twin is the Hodges-Lehmann estimate over rounds, with Wilcoxon's 95 %
interval of the log ratio: a few disturbed turns hardly change them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from repulsive.lab.bench.clock import undisturbed
from repulsive.metrics import signed_ranks
from repulsive.repulsion.settings import Settings

TRAINING = 10_000  # steps of the training that an average step belongs to
MEASURING = TRAINING // Settings().measure_every  # those that measure, with default settings
PLAIN = "plain"  # the twin that most others are compared with
LEAST_ROUNDS = signed_ranks.least_count(0.95)


@dataclass(frozen=True)
class Turn:
    """Times of one turn of a twin.

    Args:
        measuring: seconds of its first step, in which the handle measures.
        ordinary: mean seconds of the ordinary steps.
        renewing: seconds of the step that renews a force; None if the twin has no such steps.
        renewals: number of such steps in a training.
        at: position in the sequence of all turns.

    Example:
        >>> Turn(measuring=3.0, ordinary=2.0).seconds
        2.02
    """

    measuring: float
    ordinary: float
    renewing: float | None = None
    renewals: int = 0
    at: int = -1

    @property
    def seconds(self) -> float:
        """Seconds of an average step of a training."""
        return average(self.measuring, self.ordinary, self.renewing, self.renewals)


def average(measuring: float, ordinary: float, renewing: float | None, renewals: int) -> float:
    """Average one number per kind of step over a training of `TRAINING` steps."""
    others = TRAINING - MEASURING - (0 if renewing is None else renewals)
    total = MEASURING * measuring + others * ordinary + (0 if renewing is None else renewals * renewing)
    return total / TRAINING


@dataclass(frozen=True)
class Cost:
    """Step time of one twin relative to its plain twin.

    Args:
        seconds: median over turns of the seconds of its average step.
        ratio: Hodges-Lehmann estimate over rounds of its seconds over those of the plain turns around it.
        low: lower end of Wilcoxon's 95 % interval of `ratio`.
        high: upper end of the interval of `ratio`.
        geometric_mean: geometric mean over rounds, which disturbed turns change.
        median_ratio: median over rounds.
        ordinary_seconds: median over turns of the seconds of an ordinary step.
        measuring_seconds: the same of a step that measures.
        renewing_seconds: the same of a step that renews a force; None if there are no such steps.
        renewals: number of renewing steps in a training.
    """

    seconds: float
    ratio: float
    low: float
    high: float
    geometric_mean: float
    median_ratio: float
    ordinary_seconds: float
    measuring_seconds: float
    renewing_seconds: float | None
    renewals: int


def compare_turns(turns: Mapping[str, Sequence[Turn]], baselines: Mapping[str, str]) -> dict[str, Cost]:
    """Compare every twin with the turns of its plain twin right before and right after.

    Args:
        turns: name -> turns in order of time, as returned by `take_turns`.
        baselines: name of a twin -> name of the plain twin that it is compared with.

    Raises:
        ValueError: there are fewer than `LEAST_ROUNDS` rounds, or a turn lies not between two turns of its plain twin.
    """
    at = {turn.at: (name, turn.seconds) for name, own in turns.items() for turn in own}
    costs = {}
    for name, own in turns.items():
        if name not in baselines:
            costs[name] = _cost(own, [0.0] * LEAST_ROUNDS)
            continue
        logs = []
        for turn in own:
            around = [at.get(turn.at + shift, ("", 0.0)) for shift in (-1, 1)]
            if {one for one, _ in around} != {baselines[name]}:
                raise ValueError(f"turn {turn.at} of {name} lies not between two turns of {baselines[name]}")
            logs.append(math.log(turn.seconds / statistics.fmean(seconds for _, seconds in around)))
        costs[name] = _cost(own, logs)
    return costs


def _cost(turns: Sequence[Turn], logs: Sequence[float]) -> Cost:
    low_high = signed_ranks.interval(logs)
    if low_high is None:
        raise ValueError(f"a 95 % interval needs at least {LEAST_ROUNDS} rounds, got {len(logs)}")
    renewing = [turn.renewing for turn in turns if turn.renewing is not None]
    return Cost(
        seconds=statistics.median(turn.seconds for turn in turns),
        ratio=math.exp(signed_ranks.hodges_lehmann(logs)),
        low=math.exp(low_high[0]),
        high=math.exp(low_high[1]),
        geometric_mean=math.exp(statistics.fmean(logs)),
        median_ratio=math.exp(statistics.median(logs)),
        ordinary_seconds=statistics.median(turn.ordinary for turn in turns),
        measuring_seconds=statistics.median(turn.measuring for turn in turns),
        renewing_seconds=statistics.median(renewing) if renewing else None,
        renewals=turns[0].renewals,
    )


def order_of_round(baselines: Mapping[str, str], number: int) -> list[str]:
    """Return the order of turns in a round: a turn of the plain twin before and after each other turn.

    The others are reversed in every second round, and rotated every two rounds.

    Example:
        >>> order_of_round({"a": "plain", "b": "plain"}, 0)
        ['plain', 'a', 'plain', 'b', 'plain']
    """
    names = list(baselines)
    shift = number // 2 % len(names)
    names = [*names[shift:], *names[:shift]]
    order: list[str] = []
    for name in reversed(names) if number % 2 else names:
        before = [] if order and order[-1] == baselines[name] else [baselines[name]]
        order += [*before, name, baselines[name]]
    return order


def take_turns(
    turns: Mapping[str, Callable[[], Turn]],
    baselines: Mapping[str, str],
    rounds: int,
    *,
    seconds: float = math.inf,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, list[Turn]]:
    """Give every twin one turn per round, between two turns of its plain twin.

    Args:
        turns: name -> function that takes one turn of a twin.
        baselines: name of a twin -> name of the plain twin that it is compared with.
        rounds: number of rounds.
        seconds: stop after the round in which this time has passed, but not before `LEAST_ROUNDS` rounds.
        progress: called with a line of text about every tenth of the rounds.
    """
    taken: dict[str, list[Turn]] = {name: [] for name in turns}
    position, started = 0, time.perf_counter()
    with undisturbed():
        for number in range(rounds):
            for name in order_of_round(baselines, number):
                taken[name].append(replace(turns[name](), at=position))
                position += 1
            done, passed = number + 1, time.perf_counter() - started
            left = min((rounds - done) * passed / done, max(seconds - passed, (LEAST_ROUNDS - done) * passed / done))
            if done == 1 or done % max(1, rounds // 10) == 0:
                progress(f"round {done} of {'at most ' if seconds < math.inf else ''}{rounds}, about {left:.0f} s left")
            if passed >= seconds and done >= LEAST_ROUNDS:
                break
    return taken
