"""What the runs of the demo show: paired differences from plain training, as a table and as sentences."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from repulsive.lab.demo.runs import Result
from repulsive.lab.demo.settings import ARMS, PLAIN, REGULARIZED, REPELLED
from repulsive.metrics import student

LEVEL = 0.95


@dataclass(frozen=True)
class Measure:
    """A number of each run.

    Args:
        key: attribute of `Result`.
        name: name in charts.
        short: name in tables.
        digits: decimals shown.
    """

    key: str
    name: str
    short: str
    digits: int


MEAN = Measure("mean", "similarity of heads, mean of pairs", "mean cosine", 2)
LARGEST = Measure("largest", "similarity of heads, largest pair", "largest cosine", 2)
LOSS = Measure("held_out", "held-out loss, nats per byte", "held-out loss", 3)
MEASURES = (MEAN, LARGEST, LOSS)


@dataclass(frozen=True)
class Difference:
    """Paired difference of an arm from plain training, over seeds.

    Args:
        values: difference for each seed.
        digits: decimals shown.
    """

    values: Sequence[float]
    digits: int

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Confidence interval of the mean by Student's t; None for a single seed."""
        return student.interval(self.values, LEVEL)

    @property
    def direction(self) -> int:
        """-1 if the whole interval is below zero, 1 if it is above; 0 if it contains zero or there is none."""
        if self.interval is None:
            return 0
        low, high = self.interval
        return -1 if high < 0 else 1 if low > 0 else 0

    def __str__(self) -> str:
        def signed(value: float) -> str:
            return f"{value:+.{self.digits}f}"

        if self.interval is None:
            return signed(self.mean)
        return f"{signed(self.mean)} [{signed(self.interval[0])}, {signed(self.interval[1])}]"


class Findings:
    """Results of all runs, by arm and seed.

    Args:
        results: one result for every arm and seed.
    """

    def __init__(self, results: Sequence[Result]) -> None:
        self.results: Mapping[tuple[str, int], Result] = {(each.job.arm, each.job.seed): each for each in results}
        self.seeds = sorted({each.job.seed for each in results})

    def values(self, arm: str, measure: Measure) -> list[float]:
        """List a measure of an arm, for each seed."""
        return [getattr(self.results[arm, seed], measure.key) for seed in self.seeds]

    def mean(self, arm: str, measure: Measure) -> str:
        """Format the mean over seeds."""
        return f"{statistics.fmean(self.values(arm, measure)):.{measure.digits}f}"

    def difference(self, arm: str, measure: Measure) -> Difference:
        """Compare an arm with plain training."""
        pairs = zip(self.values(arm, measure), self.values(PLAIN, measure), strict=True)
        return Difference([own - plain for own, plain in pairs], measure.digits)

    @property
    def over(self) -> str:
        """Name the seeds that the means are over."""
        return "one seed" if len(self.seeds) == 1 else f"{len(self.seeds)} seeds"

    def as_text(self) -> str:
        """Format the table for a terminal of 80 columns."""
        interval = "" if len(self.seeds) == 1 else ", 95 % interval"
        lines = [f"{self.over:27}  {'mean':>6}  difference from plain{interval}"]
        for measure in MEASURES:
            for arm in ARMS:
                name, change = (measure.short, "") if arm == PLAIN else ("", str(self.difference(arm, measure)))
                lines.append(f"{name:14}  {arm:11}  {self.mean(arm, measure):>6}  {change}".rstrip())
        return "\n".join(lines)

    def last_line(self) -> str:
        """Say in one line what repulsion did to the similarity of heads and to the held-out loss."""
        heads, loss = self.difference(REPELLED, MEAN), self.difference(REPELLED, LOSS)
        cosines = f"{self.mean(PLAIN, MEAN)} -> {self.mean(REPELLED, MEAN)}"
        if loss.interval is None:
            return f"Similarity of heads: {cosines}. Loss {loss}; one seed has no interval."
        became = {-1: f"Heads less alike: {cosines}", 1: f"Heads more alike: {cosines}"}
        verdict = {-1: "lower", 1: "higher"}.get(loss.direction, "not significant")
        return f"{became.get(heads.direction, f'Heads {cosines}: not significant')}. Loss {loss}: {verdict}."

    def heads_sentence(self) -> str:
        """Say what repulsion did to the similarity of heads."""
        change, plain, repelled = self.difference(REPELLED, MEAN), *(self.mean(arm, MEAN) for arm in (PLAIN, REPELLED))
        what = "the mean cosine between the attention logits of two heads"
        if change.interval is None:
            return f"With one seed, {what} is {repelled} instead of {plain} (difference {change})."
        if change.direction:
            became = "less" if change.direction < 0 else "more"
            effect = f"Repulsion made heads {became} alike"
        else:
            effect = "Repulsion did not change the similarity of heads significantly"
        return f"{effect}: {what} is {repelled} instead of {plain} (difference {change})."

    def loss_sentence(self, arm: str = REPELLED) -> str:
        """Say what repulsion, or the regularizer, did to the held-out loss."""
        change = self.difference(arm, LOSS)
        name = {REPELLED: "repulsion", REGULARIZED: "the regularizer"}[arm]
        if change.interval is None:
            return f"With {name} the held-out loss differs by {change} nats per byte; one seed gives no interval."
        if not change.direction:
            return f"With {name} the held-out loss is not significantly different: {change} nats per byte."
        became = "lower" if change.direction < 0 else "higher"
        return f"With {name} the held-out loss is {became}: {change} nats per byte."
