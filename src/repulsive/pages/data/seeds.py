"""A number of every run, by method and seed, for a chart of dots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SeedChart:
    """A chart with one column per method and one dot per seed.

    Args:
        name: title above the chart.
        values: method -> one number per seed.
        seeds: the seeds, in the order of the numbers.
        intervals: method -> (low, high), drawn beside its dots around the mean.
        joined: join the dots of a seed by a line, for numbers that are compared seed by seed.
        zero: draw a line at zero, for differences.
        digits: decimals of the numbers in words.
    """

    name: str
    values: Mapping[str, Sequence[float]]
    seeds: Sequence[int]
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    joined: bool = False
    zero: bool = False
    digits: int = 3

    def __post_init__(self) -> None:
        for method, values in self.values.items():
            if len(values) != len(self.seeds) or not values or not all(map(math.isfinite, values)):
                raise ValueError(
                    f"chart {self.name!r}: expected a finite number of {method!r} for each of {len(self.seeds)} seeds"
                )
        if unknown := set(self.intervals) - set(self.values):
            raise ValueError(f"chart {self.name!r}: intervals of {sorted(unknown)}, which have no values")
