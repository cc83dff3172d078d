"""Timing of training variants in alternation: step times, order, and comparison over many rounds.

A *turn* is a few consecutive steps of one variant; in a round every variant has one turn.

Steps of a training differ. The handle of `repel` measures its groups in one of `measure_every` steps, 50 by default. A
rule with `space="logits"` renews its force in a few steps. Both cost more than an ordinary step, so each turn has one
of each kind, timed separately, and a few ordinary ones. The seconds of an average step are those of a training of
10,000 steps, with 200 that measure, and 346 that renew if `every="auto"`. Plain turns are timed in the same way.

A rule with `act_every=n` acts in one of n steps. All its times are means over periods of n steps, which begin with a
step in which it acts. Steps that measure or renew are such steps. Some rules are switched off by a schedule after a
part of the training; steps of the rest are timed, too.

Each turn lies between two turns of plain training, and is compared with their mean. A turn is short, so that slow drift
of the machine cancels. The ratio is the Hodges-Lehmann estimate over rounds, with Wilcoxon's 95 % interval of the log
ratio: a few disturbed turns hardly change them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from repulsive.lab.bench.clock import paused_garbage_collection
from repulsive.metrics import signed_ranks
from repulsive.repulsion.settings import Settings

TRAINING = 10_000  # steps of the training that an average step belongs to
MEASURING = TRAINING // Settings().measure_every  # those that measure, with default settings
PLAIN = "plain"  # the variant that most others are compared with
LEAST_ROUNDS = signed_ranks.least_count(0.95)


@dataclass(frozen=True)
class TurnTimes:
    """Times of one turn of a variant: mean seconds of a step, by kind of period.

    Args:
        measuring: of the first period, in which the handle measures.
        ordinary: of the ordinary periods.
        renewing: of the period that renews a force; None if there is no such period.
        renewals: number of steps of a training that renew the force.
        act_every: steps of a period.
        off: of a period after a schedule has switched the rule off; None if there is no such period.
        active: number of steps of a training before that.
        at: position in the sequence of all turns.

    Example:
        >>> TurnTimes(measuring=3.0, ordinary=2.0).seconds
        2.02
    """

    measuring: float
    ordinary: float
    renewing: float | None = None
    renewals: int = 0
    act_every: int = 1
    off: float | None = None
    active: int = TRAINING
    at: int = -1

    @property
    def seconds(self) -> float:
        """Seconds of an average step of a training."""
        active = average(self.measuring, self.ordinary, self.renewing, self.renewals, self.act_every, self.active)
        return over_training(active, self.off, self.active)


def average(
    measuring: float,
    ordinary: float,
    renewing: float | None,
    renewals: int,
    act_every: int = 1,
    active: int = TRAINING,
) -> float:
    """Average one number per kind of period over the `active` steps of a training, in which a rule is not switched off.

    A period has `act_every` steps, each number is a mean over its steps, and at most one of its steps measures or
    renews. The additional costs of measuring and renewing add up.
    """
    mean = ordinary + min(1.0, act_every * MEASURING / TRAINING) * (measuring - ordinary)
    return mean if renewing is None else mean + act_every * renewals / active * (renewing - ordinary)


def over_training(active: float, off: float | None, steps: int) -> float:
    """Average over a training in which a schedule switches a rule off.

    Args:
        active: mean over the steps before.
        off: mean over the steps after; None if there are none.
        steps: number of steps before.
    """
    return active if off is None else (steps * active + (TRAINING - steps) * off) / TRAINING


@dataclass(frozen=True)
class Cost:
    """Step time of one variant relative to plain training.

    Args:
        seconds: median over turns of the seconds of its average step.
        ratio: Hodges-Lehmann estimate over rounds of its seconds over those of the plain turns around it.
        low: lower end of Wilcoxon's 95 % interval of `ratio`.
        high: upper end of the interval of `ratio`.
        geometric_mean: geometric mean over rounds, which disturbed turns change.
        median_ratio: median over rounds.
        ordinary_seconds: median over turns of the seconds of a step in ordinary periods.
        measuring_seconds: the same in periods that measure.
        renewing_seconds: the same in periods that renew a force; None if there are no such periods.
        renewals: number of renewing steps in a training.
        act_every: steps of a period.
        active: number of steps of a training until a schedule switches the rule off.
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
    act_every: int
    active: int


def compare_turns(turns: Mapping[str, Sequence[TurnTimes]], baselines: Mapping[str, str]) -> dict[str, Cost]:
    """Compare every turn with the plain turns right before and right after.

    Args:
        turns: name -> turns in order of time, as returned by `run_rounds`.
        baselines: name of a variant -> name of the plain one that it is compared with.

    Raises:
        ValueError: there are fewer than `LEAST_ROUNDS` rounds, or a turn does not lie between two plain turns.
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
                raise ValueError(f"turn {turn.at} of {name} does not lie between two turns of {baselines[name]}")
            logs.append(math.log(turn.seconds / statistics.fmean(seconds for _, seconds in around)))
        costs[name] = _cost(own, logs)
    return costs


def _cost(turns: Sequence[TurnTimes], logs: Sequence[float]) -> Cost:
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
        act_every=turns[0].act_every,
        active=turns[0].active,
    )


def order_of_round(baselines: Mapping[str, str], number: int) -> list[str]:
    """Return the order of turns in a round: a plain turn before and after each other turn.

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


def run_rounds(
    turns: Mapping[str, Callable[[], TurnTimes]],
    baselines: Mapping[str, str],
    rounds: int | None = None,
    *,
    seconds: float = math.inf,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, list[TurnTimes]]:
    """Run every variant for one turn per round, between two plain turns.

    Args:
        turns: name -> function that runs one turn and returns its times.
        baselines: name of a variant -> name of the plain one that it is compared with.
        rounds: largest number of rounds; None for as many as fit in `seconds`.
        seconds: stop after the round in which this time has passed, but not before `LEAST_ROUNDS` rounds.
        progress: called with a line of text after the first round and about every tenth of the time.

    Raises:
        ValueError: neither rounds nor seconds are limited.
    """
    if rounds is None and seconds == math.inf:
        raise ValueError("expected a limit: a number of rounds, or seconds")
    most = math.inf if rounds is None else rounds
    limit = "" if rounds is None else f" of {'at most ' if seconds < math.inf else ''}{rounds}"
    times: dict[str, list[TurnTimes]] = {name: [] for name in turns}
    done, position, passed, reported, started = 0, 0, 0.0, -1, time.perf_counter()
    with paused_garbage_collection():
        while done < most and (passed < seconds or done < LEAST_ROUNDS):
            for name in order_of_round(baselines, done):
                times[name].append(replace(turns[name](), at=position))
                position += 1
            done, passed = done + 1, time.perf_counter() - started
            left = max(0.0, seconds - passed, (LEAST_ROUNDS - done) * passed / done)
            if rounds is not None:
                left = min(left, (rounds - done) * passed / done)
            tenths = int(10 * passed / (passed + left)) if left else 10
            if tenths > reported:
                progress(f"round {done}{limit}, about {left:.0f} s left")
                reported = tenths
    return times
