"""Search spaces for equal budgets: every arm tries the same number of points of one common space.

The coordinates of point k in the common ranges are the same for all arms; further coordinates are the arm's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch

EDGE = 0.1  # a chosen value within this share of its range from an end is reported


@dataclass(frozen=True)
class Range:
    """Range of a setting.

    Args:
        key: key of the recipe.
        low: lower end.
        high: upper end.
        is_log: uniform in the logarithm.
    """

    key: str
    low: float
    high: float
    is_log: bool = True

    def value(self, share: float) -> float:
        """Return the value at a share of the range, 0 to 1, with three digits."""
        if self.is_log:
            return float(f"{self.low * (self.high / self.low) ** share:.3g}")
        return float(f"{self.low + (self.high - self.low) * share:.3g}")

    def share(self, value: float) -> float:
        """Return the position of a value in the range, 0 to 1; the inverse of `value`."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True, eq=False)
class Space:
    """A search space.

    Args:
        common: ranges of all arms.
        own: arm -> ranges of its own strength.
        seed: seed of the points.
    """

    common: tuple[Range, ...]
    own: Mapping[str, tuple[Range, ...]]
    seed: int = 0

    def ranges(self, arm: str) -> tuple[Range, ...]:
        """Return all ranges of an arm."""
        return (*self.common, *self.own[arm])

    def trials(self, arm: str, count: int) -> tuple[tuple[str, ...], ...]:
        """List the `key=value` changes of an arm's trials: scrambled Sobol points, the same for all arms.

        Args:
            arm: name of the arm.
            count: number of trials.
        """
        points, ranges = _points(self, count), self.ranges(arm)
        return tuple(tuple(f"{r.key}={r.value(x)}" for r, x in zip(ranges, p, strict=False)) for p in points)

    def at_edges(self, arm: str, changes: Sequence[str]) -> list[str]:
        """List the keys whose value lies near an end of its range."""
        values = as_settings(changes)
        shares = {r.key: r.share(values[r.key]) for r in self.ranges(arm)}
        return [key for key, share in shares.items() if not EDGE <= share <= 1 - EDGE]


@cache
def _points(space: Space, count: int) -> list[list[float]]:
    dimensions = len(space.common) + max(map(len, space.own.values()))
    engine = torch.quasirandom.SobolEngine(dimensions, scramble=True, seed=space.seed)
    points: list[list[float]] = engine.draw(count, dtype=torch.float64).tolist()
    return points


def as_settings(changes: Sequence[str]) -> Mapping[str, float]:
    """Return key -> value of some `key=value` changes."""
    return {key: float(value) for key, value in (change.split("=", 1) for change in changes)}
