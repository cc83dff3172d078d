"""Arms of the study `paper_sizes`, and the points that every arm tries: one common space, the same number of points.

The first three coordinates of point k (learning rate, dropout, weight decay) are the same for all arms; further
coordinates are the method's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch

BASELINE = "ma"
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


COMMON = (
    Range("optimizer.lr", 2e-4, 6e-3),
    Range("model.dropout", 0.0, 0.7, is_log=False),
    Range("optimizer.weight_decay", 1e-6, 1e-3),
)
OWN: dict[str, tuple[Range, ...]] = {  # recipe of the arm -> ranges of its own strength
    "ma": (),
    "frobenius": (Range("method.penalty", 3e-4, 0.3),),
    "svgd": (Range("method.ratio", 0.03, 3.0),),
    "spos": (Range("method.ratio", 0.03, 3.0), Range("method.beta", 1e4, 1e7)),
    "cosine-smoothing": (Range("method.alpha", 1e-3, 1.0),),
    "kernel-free": (Range("method.ratio", 0.03, 3.0),),
}
ARMS = tuple(arm for arm in OWN if arm != "kernel-free")  # the paper's methods; the control is tried if it is named
# With 30 heads this stepsize keeps the size of their gradients: weight decay and clipping act as in plain training.
REPELLED = ("svgd", "spos", "cosine-smoothing", "kernel-free")
FIXED: dict[str, tuple[str, ...]] = dict.fromkeys(REPELLED, ("method.stepsize=30",))


@dataclass(frozen=True, eq=False)
class Space:
    """A search space.

    Args:
        common: ranges of all arms.
        own: recipe of the arm -> ranges of its own strength.
        seed: seed of the points.
    """

    common: tuple[Range, ...]
    own: Mapping[str, tuple[Range, ...]]
    seed: int = 0

    def ranges(self, arm: str) -> tuple[Range, ...]:
        """Return all ranges of an arm."""
        return (*self.common, *self.own[arm])


FIRST = Space(COMMON, OWN)
WIDE = Space(  # ranges in which some arm chose a value near an end are wider than in the first space
    (
        Range("optimizer.lr", 2e-4, 1e-2),
        Range("model.dropout", 0.0, 0.7, is_log=False),
        Range("optimizer.weight_decay", 1e-7, 1e-2),
    ),
    {
        "ma": (),
        "frobenius": (Range("method.penalty", 1e-5, 3.0),),
        "svgd": (Range("method.ratio", 3e-3, 10.0),),
        "spos": (Range("method.ratio", 3e-3, 10.0), Range("method.beta", 1e3, 1e8)),
        "cosine-smoothing": (Range("method.alpha", 1e-4, 10.0),),
        "kernel-free": (Range("method.ratio", 3e-3, 10.0),),
    },
    seed=1,
)


@cache
def trials(arm: str, count: int, space: Space = FIRST) -> tuple[tuple[str, ...], ...]:
    """List the `key=value` changes of an arm's trials: scrambled Sobol points, the same for all arms.

    Args:
        arm: recipe of the arm.
        count: number of trials.
        space: the search space.
    """
    dimensions = len(space.common) + max(map(len, space.own.values()))
    engine = torch.quasirandom.SobolEngine(dimensions, scramble=True, seed=space.seed)
    points, ranges = engine.draw(count, dtype=torch.float64).tolist(), space.ranges(arm)
    return tuple(tuple(f"{r.key}={r.value(x)}" for r, x in zip(ranges, p, strict=False)) for p in points)


def at_edges(arm: str, changes: Sequence[str], space: Space = FIRST) -> list[str]:
    """List the keys whose value lies near an end of its range."""
    values = as_settings(changes)
    shares = {r.key: r.share(values[r.key]) for r in space.ranges(arm)}
    return [key for key, share in shares.items() if not EDGE <= share <= 1 - EDGE]


def as_settings(changes: Sequence[str]) -> Mapping[str, float]:
    """Return key -> value of some `key=value` changes."""
    return {key: float(value) for key, value in (change.split("=", 1) for change in changes)}
