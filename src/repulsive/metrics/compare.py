"""Paired significance tests of two systems over test items, seeds, or both."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from repulsive.metrics.student import half_width

Over = Literal["items", "seeds", "both"]
OVER: tuple[str, ...] = get_args(Over)
_CHUNK = 4_000_000  # random numbers per draw, to limit memory. Changing it changes the results of a seed


@dataclass(frozen=True)
class Comparison:
    """Mean difference between two systems (first - second), with confidence interval and p-value.

    Args:
        difference: mean over seeds and items.
        low: lower end of the confidence interval.
        high: upper end of the confidence interval.
        p_value: two-sided p-value under the null hypothesis that the two systems are exchangeable.
        over: the units that are resampled: items, seeds or both.
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
    over: Over = "items",
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Comparison:
    r"""Compute the confidence interval and sign-flip test of the mean of $d_{sn} = first_{sn} - second_{sn}$.

    "items" averages over seeds, $d_n = \frac1S \sum_s d_{sn}$, and tests whether *these* trained models differ on new
    test items. "seeds" averages over items and tests whether *new training runs* would differ on this test set; with S
    seeds its p-value cannot be below $2^{1 - S}$. "both" tests for new runs and new items: the half-widths of the two
    intervals add in quadrature, $\sqrt{w_{items}^2 + w_{seeds}^2}$, and the p-value is the larger of the two.

    The interval over items is the percentile bootstrap. The interval over seeds, of which there are few, is Student's
    t: a bootstrap of three runs covers the true mean in 75 % of cases, not 95 %.
    The test is a sign-flip test: under the null hypothesis $d$ and $-d$ are equally likely. All $2^n$ flips are counted
    if there are at most `resamples`; else `resamples` are drawn and
    $p = (1 + \#\{|t^*| \ge |t|\}) / (1 + resamples)$.

    Args:
        first: score of each item under each seed, [S, N] or [N], such as 1 for a correct answer, or a log-likelihood.
        second: the same for the other system; the two are paired by seed and item.
        over: "items", "seeds" or "both".
        level: confidence level of the interval.
        resamples: number of bootstrap samples and of sign flips.
        seed: seed of the resampling.

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
    _check_resampling(level, resamples)
    d = torch.atleast_2d(first.detach().cpu().double() - second.detach().cpu().double())  # [S, N]
    if not d.isfinite().all():
        raise ValueError("the scores contain infinite or missing (nan) values; exclude these items from both systems")
    _check_units(d, over)
    generator = torch.Generator().manual_seed(seed)
    sampled = _bootstrap(d.mean(0), resamples, generator) if over != "seeds" else None  # [resamples]
    low, high = _interval(d.mean(1), sampled, over, level)
    units = {"items": [d.mean(0)], "seeds": [d.mean(1)], "both": [d.mean(0), d.mean(1)]}[over]
    p = max(_sign_flip_test(unit, resamples, generator) for unit in units)
    return Comparison(float(d.mean()), low, high, p, over, *d.shape)


def compare_totals(
    first: Tensor,
    second: Tensor,
    score: Callable[[Tensor], Tensor],
    over: Over = "items",
    *,
    level: float = 0.95,
    resamples: int = 1_000,
    seed: int = 0,
) -> Comparison:
    """Compare systems like `compare`, by a score that is a function of sums over items, such as BLEU or a correlation.

    Over items, bootstrap samples of the test set are scored again (Koehn, 2004), and the test swaps the two systems'
    outputs for random items (Riezler and Maxwell, 2005). Seeds are treated as in `compare`.

    Args:
        first: statistics of each item under each seed, [S, N, C] or [N, C].
        second: statistics of the other system, with the shape of `first`.
        score: function of summed statistics, [..., C] -> [...].
        over: "items", "seeds" or "both".
        level: confidence level of the interval.
        resamples: number of bootstrap samples and of random swaps.
        seed: seed of the resampling.

    Raises:
        ValueError: the shapes differ, there are fewer than two units to resample, or a number is not finite.
    """
    if first.shape != second.shape or first.ndim not in (2, 3):
        shapes = f"{list(first.shape)} and {list(second.shape)}"
        raise ValueError(f"statistics {shapes}: both need [seeds, items, columns]")
    a, b = (x.detach().cpu().double().reshape(-1, *x.shape[-2:]) for x in (first, second))  # [S, N, C]
    seeds, items = a.shape[:2]
    if over not in OVER or (over != "seeds" and items < 2) or (over != "items" and seeds < 2):
        raise ValueError(
            f"over={over!r} needs at least two units to resample, got {seeds} seeds and {items} items; "
            f"choose one of {OVER}"
        )
    _check_resampling(level, resamples)
    if not (a.isfinite().all() and b.isfinite().all()):
        raise ValueError(
            "the statistics contain infinite or missing (nan) values; exclude these items from both systems"
        )
    generator = torch.Generator().manual_seed(seed)
    runs = score(a.sum(1)) - score(b.sum(1))  # [S]
    sampled = None
    if over != "seeds":
        sets = []
        for size in _chunks(resamples, items):
            columns = _counts(items, size, generator)
            scores = [score(torch.einsum("rn,snc->rsc", columns, x)) for x in (a, b)]  # [size, S]
            sets.append((scores[0] - scores[1]).mean(1))
        sampled = torch.cat(sets)
    low, high = _interval(runs, sampled, over, level)
    tests: dict[str, list[Callable[[], float]]] = {
        "items": [lambda: _swap_test(a, b, score, resamples, generator)],
        "seeds": [lambda: _sign_flip_test(runs, resamples, generator)],
    }
    p = max(test() for test in (tests["items"] + tests["seeds"] if over == "both" else tests[over]))
    return Comparison(float(runs.mean()), low, high, p, over, seeds, items)


def _swap_test(
    a: Tensor, b: Tensor, score: Callable[[Tensor], Tensor], resamples: int, generator: torch.Generator
) -> float:
    """Compute the two-sided p-value of the score difference by swapping the systems' outputs for random items."""
    ours, theirs = score(a.sum(1)), score(b.sum(1))  # [S]
    threshold = _tie_threshold((ours - theirs).mean(), torch.stack([ours, theirs]))
    items, reached = a.shape[1], 0
    for size in _chunks(resamples, items):
        swap = torch.randint(2, (size, items), generator=generator).double()
        moved = torch.einsum("rn,snc->rsc", swap, b - a)  # added to the first system, subtracted from the second
        differences = score(a.sum(1) + moved) - score(b.sum(1) - moved)  # [size, S]
        reached += int((differences.mean(1).abs() >= threshold).sum())
    return (1 + reached) / (1 + resamples)


def _interval(runs: Tensor, sampled: Tensor | None, over: Over, level: float) -> tuple[float, float]:
    """Compute the lower and upper end of the confidence interval.

    Args:
        runs: difference for each seed [S].
        sampled: differences of the bootstrap samples of items; None if over="seeds".
        over: "items", "seeds" or "both".
        level: confidence level.
    """
    mean = float(runs.mean())
    below = above = half_width(runs.tolist(), level) if over != "items" else 0.0
    if sampled is not None:
        tail = (1 - level) / 2
        low, high = sampled.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
        if over == "items":
            return low, high
        below, above = math.hypot(below, mean - low), math.hypot(above, high - mean)
    return mean - below, mean + above


def _bootstrap(d: Tensor, resamples: int, generator: torch.Generator) -> Tensor:
    """Compute the means of bootstrap samples of item differences: [N] -> [resamples]."""
    items = len(d)
    drawn = (torch.randint(items, (size, items), generator=generator) for size in _chunks(resamples, items))
    return torch.cat([d[rows].mean(1) for rows in drawn])


def _counts(units: int, size: int, generator: torch.Generator) -> Tensor:
    """Draw `size` bootstrap samples, as the number of times each unit occurs: [size, units]."""
    drawn = torch.randint(units, (size, units), generator=generator)
    return torch.zeros(size, units, dtype=torch.float64).scatter_add_(1, drawn, torch.ones(1).double().expand_as(drawn))


def _sign_flip_test(d: Tensor, resamples: int, generator: torch.Generator) -> float:
    """Compute the two-sided p-value of the mean of differences [n] under random signs."""
    threshold = _tie_threshold(d.mean(), d)
    if 2 ** len(d) <= resamples:
        signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=len(d))), dtype=torch.float64)
        return float(((signs @ d / len(d)).abs() >= threshold).double().mean())
    reached = 0
    for size in _chunks(resamples, len(d)):
        signs = torch.randint(2, (size, len(d)), generator=generator, dtype=torch.int8) * 2.0 - 1
        reached += int(((signs.double() @ d / len(d)).abs() >= threshold).sum())
    return (1 + reached) / (1 + resamples)


def _tie_threshold(observed: Tensor, values: Tensor) -> Tensor:
    """Compute the threshold for counting a flip: slightly below the observed value, so that rounding keeps ties."""
    return observed.abs() * (1 - 1e-9) - 1e-12 * values.abs().max()


def _check_resampling(level: float, resamples: int) -> None:
    if not 0 < level < 1 or resamples < 1:
        raise ValueError(f"level={level} must lie between 0 and 1, and resamples={resamples} at least 1")


def _chunks(resamples: int, width: int) -> list[int]:
    size = max(1, min(resamples, _CHUNK // width))
    return [min(size, resamples - start) for start in range(0, resamples, size)]


def _check_units(d: Tensor, over: Over) -> None:
    seeds, items = d.shape
    if items < 2 and over != "seeds":
        raise ValueError(f"{items} test items: at least two are needed to resample items")
    if seeds < 2 and over != "items":
        raise ValueError(f"{seeds} seeds: at least two are needed to resample seeds; over='items' needs one")
