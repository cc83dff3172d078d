"""Schedules of alpha or of the target ratio over optimizer steps. A schedule is any callable step -> number."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

from repulsive.particles.rule import check_number

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Constant:
    """The same value at every step."""

    value: float

    def __post_init__(self) -> None:
        _check(self)

    def __call__(self, step: int) -> float:
        return self.value


@dataclass(frozen=True)
class Until:
    """The value in the first `steps`, then zero."""

    steps: int
    value: float

    def __post_init__(self) -> None:
        _check(self)

    def __call__(self, step: int) -> float:
        return self.value if step < self.steps else 0.0


@dataclass(frozen=True)
class Linear:
    """A straight line from `start` to `end` over `steps`, then `end`."""

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        _check(self)

    def __call__(self, step: int) -> float:
        return self.start + (self.end - self.start) * min(1.0, step / self.steps)


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from `start` to `end` over `steps`, then `end`."""

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        _check(self)

    def __call__(self, step: int) -> float:
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * min(1.0, step / self.steps))) / 2


@dataclass(frozen=True)
class WarmUp:
    """Grow linearly from zero over `steps`, then follow `then`, whose step 0 is the end of the warm-up."""

    steps: int
    then: float | Schedule

    def __post_init__(self) -> None:
        _check(self)

    def __call__(self, step: int) -> float:
        after = self.then(max(0, step - self.steps)) if callable(self.then) else self.then
        return after * min(1.0, step / self.steps)


def _check(schedule: Constant | Until | Linear | Cosine | WarmUp) -> None:
    """Raise an error for values that would fail in a later step, or that would attract heads to each other."""
    for one in fields(schedule):
        value = getattr(schedule, one.name)
        if one.name == "then" and callable(value):
            continue
        check_number(schedule, one.name, least=1 if one.name == "steps" else 0)
