"""Statistics of the answers to one criterion: shares with confidence intervals, sign test, agreement."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from repulsive.lab.judge.agreement import Agreement, fleiss_kappa

WIN, LOSE, TIE = 1.0, -1.0, 0.0


@dataclass(frozen=True)
class Share:
    """A share of answers, or a difference of two shares, with its confidence interval; None if not computable."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Verdict:
    """Result for one criterion.

    Args:
        answers: number of answers.
        win: share of answers that prefer the first system.
        lose: share of answers that prefer the second system.
        tie: share of ties.
        lead: win - lose.
        items_for: number of items for which more judges prefer the first system.
        items_against: number of items for which more judges prefer the second system.
        p_value: p-value of the sign test over the items in `items_for` and `items_against`.
        agreement: agreement between judges.
    """

    answers: int
    win: Share
    lose: Share
    tie: Share
    lead: Share
    items_for: int
    items_against: int
    p_value: float
    agreement: Agreement


def verdict(votes: Tensor, *, resamples: int = 10_000) -> Verdict:
    """Compute the result for one criterion.

    Shares are relative to all answers, as in the paper. The 95 % intervals are percentiles of a bootstrap over items.
    Several judges are resampled, too, each with all their answers: such an interval generalises to other items *and*
    other judges. The sign test counts each item once, for the system that more judges prefer.

    Args:
        votes: WIN, LOSE or TIE of the first system, NaN without an answer, [J, N].
        resamples: number of bootstrap samples.

    Raises:
        ValueError: there is no answer.
    """
    given = ~votes.isnan()  # [J, N]
    if votes.ndim != 2 or not given.any():
        raise ValueError(f"expected votes [judges, items] with at least one answer, got {list(votes.shape)}")
    kinds = torch.stack([votes == WIN, votes == LOSE, votes == TIE]).double()  # [3, J, N]
    shares = kinds.sum((1, 2)) / given.sum()
    drawn = _resampled(kinds, given.double(), resamples)  # [resamples, 3], or [0, 3]
    lead = torch.tensor([[1.0], [-1.0], [0.0]], dtype=torch.float64)
    values = torch.cat([shares, shares @ lead])  # [4]
    low, high = _interval(torch.cat([drawn, drawn @ lead], 1))
    win, lose, tie, ahead = (Share(*three) for three in zip(values.tolist(), low, high, strict=True))
    sums = votes.nan_to_num(0.0).sum(0)  # [N]
    more, fewer = int((sums > 0).sum()), int((sums < 0).sum())
    agreement = fleiss_kappa(kinds.sum(1).T)
    return Verdict(int(given.sum()), win, lose, tie, ahead, more, fewer, sign_test(more, fewer), agreement)


def sign_test(more: int, fewer: int) -> float:
    r"""Compute the exact two-sided p-value of `more` against `fewer` under a fair coin; ties are ignored.

    $$p = \min\Big(1,\; 2 \sum_{k=0}^{\min(a, b)} \binom{a + b}{k} 2^{-(a + b)}\Big)$$

    Example:
        >>> sign_test(5, 0)
        0.0625
    """
    n = more + fewer
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(min(more, fewer) + 1)) / 2**n)


def _resampled(kinds: Tensor, given: Tensor, resamples: int) -> Tensor:
    """Compute shares of bootstrap samples of items (and of several judges), [resamples, 3].

    Samples without answers are dropped.
    """
    judges, items = given.shape
    if int((given.sum(0) > 0).sum()) < 2:  # with one answered item all samples are equal
        return torch.zeros(0, 3, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    item_counts = _draw_counts(items, resamples, generator)  # [R, N]
    judge_counts = torch.ones(resamples, 1, dtype=torch.float64)  # [R, J]
    if judges > 1:
        judge_counts = _draw_counts(judges, resamples, generator)
    total = ((judge_counts @ given) * item_counts).sum(1)  # [R]
    counts = torch.stack([((judge_counts @ kind) * item_counts).sum(1) for kind in kinds], 1)  # [R, 3]
    return (counts / total[:, None])[total > 0]


def _draw_counts(units: int, resamples: int, generator: torch.Generator) -> Tensor:
    """Draw units with replacement and count how often each is drawn, [resamples, units]."""
    drawn = torch.randint(units, (resamples, units), generator=generator)
    return torch.zeros(resamples, units, dtype=torch.float64).scatter_add_(
        1, drawn, torch.ones_like(drawn, dtype=torch.float64)
    )


def _interval(drawn: Tensor) -> tuple[list[float | None], list[float | None]]:
    if not len(drawn):
        return [None] * drawn.shape[1], [None] * drawn.shape[1]
    low, high = drawn.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0).tolist()
    return low, high
