"""Is one system better than another? Paired, over test items, over seeds, or over both."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from repulsive.metrics.student import half_width

OVER = ("items", "seeds", "both")
_CHUNK = 4_000_000  # numbers drawn at once: bounds memory, and is part of what a seed means


@dataclass(frozen=True)
class Comparison:
    """What can be said about the mean of first - second.

    Args:
        difference: mean over seeds and items.
        low: lower end of the confidence interval.
        high: upper end.
        p_value: two-sided, of the hypothesis that the two systems are exchangeable.
        over: what is taken for a sample: items, seeds or both.
        seeds: number of seeds.
        items: number of test items.
    """

    difference: float
    low: float
    high: float
    p_value: float
    over: str
    seeds: int
    items: int

    def __str__(self) -> str:
        size = f"{self.seeds} {'seed' if self.seeds == 1 else 'seeds'} x {self.items} items"
        return f"{self.difference:+.4f} [{self.low:+.4f}, {self.high:+.4f}], p = {self.p_value:.4f} ({size})"


def compare(
    first: Tensor,
    second: Tensor,
    over: str = "items",
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Comparison:
    r"""Confidence interval and sign-flip test of the mean of $d_{sn} = first_{sn} - second_{sn}$.

    "items" pools over seeds, $d_n = \frac1S \sum_s d_{sn}$, and asks whether *these* trained models differ on new test
    items. "seeds" averages over items and asks whether *new training runs* would differ on this test set; with S seeds
    its p-value cannot fall below $2^{1 - S}$. "both" asks for new runs and new items: the ends of its interval are as
    far away as those of the two together, $\sqrt{w_{items}^2 + w_{seeds}^2}$, and its p-value is the larger of the two.

    Over items, of which there are many, the interval is the percentile bootstrap; over seeds, of which there are few,
    it is Student's t: intervals from resampling three runs hold the truth three times of four, not 95 times of 100.
    The test flips signs: under the hypothesis $d$ and $-d$ are equally likely. All $2^n$ flips are counted where they
    are no more than `resamples`, else that many are drawn and $p = (1 + \#\{|t^*| \ge |t|\}) / (1 + resamples)$.

    Args:
        first: a score of each item under each seed [S, N], or [N]: 1 for a right answer, say, or its log-likelihood.
        second: the same of the other system; seed s and item n of both belong together.
        over: "items", "seeds" or "both".
        level: of the confidence interval.
        resamples: bootstrap samples, and sign flips.
        seed: of the resampling; the same seed gives the same answer.

    Raises:
        ValueError: the shapes differ, there are fewer than two units to resample, or a number is not finite.

    Example:
        >>> right = torch.tensor([[1.0] * 30 + [0.0] * 10])
        >>> compare(right, right).p_value
        1.0
    """
    if over not in OVER:
        raise ValueError(f"over={over!r}: choose one of {OVER}")
    if first.shape != second.shape or first.ndim not in (1, 2):
        raise ValueError(f"scores {list(first.shape)} and {list(second.shape)}: both need [seeds, items] or [items]")
    _check_drawing(level, resamples)
    d = torch.atleast_2d(first.detach().cpu().double() - second.detach().cpu().double())  # [S, N]
    if not d.isfinite().all():
        raise ValueError("the scores have infinite or missing values; their mean difference means nothing")
    _enough(d, over)
    generator = torch.Generator().manual_seed(seed)
    drawn = _bootstrap(d.mean(0), resamples, generator) if over != "seeds" else None  # [resamples]
    low, high = _interval(d.mean(1), drawn, over, level)
    units = {"items": [d.mean(0)], "seeds": [d.mean(1)], "both": [d.mean(0), d.mean(1)]}[over]
    p = max(_sign_flip(unit, resamples, generator) for unit in units)
    return Comparison(float(d.mean()), low, high, p, over, *d.shape)


def compare_totals(
    first: Tensor,
    second: Tensor,
    score: Callable[[Tensor], Tensor],
    over: str = "items",
    *,
    level: float = 0.95,
    resamples: int = 1_000,
    seed: int = 0,
) -> Comparison:
    """`compare` for a score that is no mean of items, but a function of sums over them: BLEU, a correlation.

    Over items whole sets are drawn and scored again (Koehn, 2004), and the test exchanges the systems' answers to
    random items (Riezler and Maxwell, 2005); seeds are treated as in `compare`.

    Args:
        first: statistics of each item under each seed, [S, N, C] or [N, C].
        second: the same of the other system.
        score: sums of statistics [..., C] -> [...].
        over: "items", "seeds" or "both".
        level: of the confidence interval.
        resamples: sets that are drawn.
        seed: of the resampling.

    Raises:
        ValueError: the shapes differ, there are fewer than two units to resample, or a number is not finite.
    """
    if first.shape != second.shape or first.ndim not in (2, 3):
        shapes = f"{list(first.shape)} and {list(second.shape)}"
        raise ValueError(f"statistics {shapes}: both need [seeds, items, columns]")
    a, b = (x.detach().cpu().double().reshape(-1, *x.shape[-2:]) for x in (first, second))  # [S, N, C]
    seeds, items = a.shape[:2]
    if over not in OVER or (over != "seeds" and items < 2) or (over != "items" and seeds < 2):
        raise ValueError(f"over={over!r} of {seeds} seeds and {items} items: resample at least two of either")
    _check_drawing(level, resamples)
    if not (a.isfinite().all() and b.isfinite().all()):
        raise ValueError("the statistics have infinite or missing values; their scores mean nothing")
    generator = torch.Generator().manual_seed(seed)
    runs = score(a.sum(1)) - score(b.sum(1))  # [S]
    drawn = None
    if over != "seeds":
        sets = []
        for size in _chunks(resamples, items):
            columns = _counts(items, size, generator)
            scores = [score(torch.einsum("rn,snc->rsc", columns, x)) for x in (a, b)]  # [size, S]
            sets.append((scores[0] - scores[1]).mean(1))
        drawn = torch.cat(sets)
    low, high = _interval(runs, drawn, over, level)
    tests: dict[str, list[Callable[[], float]]] = {
        "items": [lambda: _exchange(a, b, score, resamples, generator)],
        "seeds": [lambda: _sign_flip(runs, resamples, generator)],
    }
    p = max(test() for test in (tests["items"] + tests["seeds"] if over == "both" else tests[over]))
    return Comparison(float(runs.mean()), low, high, p, over, seeds, items)


def _exchange(
    a: Tensor, b: Tensor, score: Callable[[Tensor], Tensor], resamples: int, generator: torch.Generator
) -> float:
    ours, theirs = score(a.sum(1)), score(b.sum(1))  # [S]
    bar, items, reached = _bar((ours - theirs).mean(), torch.stack([ours, theirs])), a.shape[1], 0
    for size in _chunks(resamples, items):
        swap = torch.randint(2, (size, items), generator=generator).double()
        moved = torch.einsum("rn,snc->rsc", swap, b - a)  # what the first system would gain
        found = score(a.sum(1) + moved) - score(b.sum(1) - moved)  # [size, S]
        reached += int((found.mean(1).abs() >= bar).sum())
    return (1 + reached) / (1 + resamples)


def _interval(runs: Tensor, drawn: Tensor | None, over: str, level: float) -> tuple[float, float]:
    """Ends of the confidence interval.

    Args:
        runs: differences of seeds [S].
        drawn: mean differences of resampled sets of items, where items count.
        over: what counts.
        level: of the interval.
    """
    mean = float(runs.mean())
    below = above = half_width(runs.tolist(), level) if over != "items" else 0.0
    if drawn is not None:
        tail = (1 - level) / 2
        low, high = drawn.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
        if over == "items":
            return low, high
        below, above = math.hypot(below, mean - low), math.hypot(above, high - mean)
    return mean - below, mean + above


def _bootstrap(d: Tensor, resamples: int, generator: torch.Generator) -> Tensor:
    """Means of resampled differences of items [N], [resamples]."""
    items = len(d)
    drawn = (torch.randint(items, (size, items), generator=generator) for size in _chunks(resamples, items))
    return torch.cat([d[rows].mean(1) for rows in drawn])


def _counts(units: int, size: int, generator: torch.Generator) -> Tensor:
    """How often each unit is drawn in `size` samples with replacement, [size, units]."""
    drawn = torch.randint(units, (size, units), generator=generator)
    return torch.zeros(size, units, dtype=torch.float64).scatter_add_(1, drawn, torch.ones(1).double().expand_as(drawn))


def _sign_flip(d: Tensor, resamples: int, generator: torch.Generator) -> float:
    """Two-sided p-value of the mean of [n]."""
    bar = _bar(d.mean(), d)
    if 2 ** len(d) <= resamples:
        signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=len(d))), dtype=torch.float64)
        return float(((signs @ d / len(d)).abs() >= bar).double().mean())
    reached = 0
    for size in _chunks(resamples, len(d)):
        signs = torch.randint(2, (size, len(d)), generator=generator, dtype=torch.int8) * 2.0 - 1
        reached += int(((signs.double() @ d / len(d)).abs() >= bar).sum())
    return (1 + reached) / (1 + resamples)


def _bar(seen: Tensor, made_of: Tensor) -> Tensor:
    """What a flip has to reach: those that tie with what was seen count, whatever the rounding, also of what is 0."""
    return seen.abs() * (1 - 1e-9) - 1e-12 * made_of.abs().max()


def _check_drawing(level: float, resamples: int) -> None:
    if not 0 < level < 1 or resamples < 1:
        raise ValueError(f"level={level} must lie between 0 and 1 and resamples={resamples} be at least 1")


def _chunks(resamples: int, width: int) -> list[int]:
    size = max(1, min(resamples, _CHUNK // width))
    return [min(size, resamples - start) for start in range(0, resamples, size)]


def _enough(d: Tensor, over: str) -> None:
    seeds, items = d.shape
    if items < 2 and over != "seeds":
        raise ValueError(f"{items} test items: at least two are needed to resample items")
    if seeds < 2 and over != "items":
        raise ValueError(f"{seeds} seeds: at least two are needed to resample seeds; over='items' needs one")
