"""From answers to win, lose, tie: shares, their intervals, a sign test, agreement."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from repulsive.lab.judge.agreement import Agreement, fleiss_kappa

WIN, LOSE, TIE = 1.0, -1.0, 0.0


@dataclass(frozen=True)
class Share:
    """A share of answers, or a difference of two, and its interval; None where there is nothing to resample."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Verdict:
    """What judges say about one criterion.

    Args:
        answers: how many were given.
        win: share of answers for the first system.
        lose: for the second.
        tie: for neither.
        lead: win - lose.
        items_for: items where more judges are for the first system than for the second.
        items_against: the other way round.
        p_value: sign test over these items.
        agreement: between judges.
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


def verdict(votes: Tensor, *, level: float = 0.95, resamples: int = 10_000, seed: int = 0) -> Verdict:
    """What answers [judges, items] say: WIN, LOSE or TIE, and NaN where there is none.

    Shares are of all answers given, as in the paper. Intervals are percentiles of a bootstrap over items; with several
    judges these are resampled too, each with all answers of theirs, so that an interval speaks about other items *and*
    other judges. The sign test counts an item once, however many judges it had: for the system more of them chose.

    Args:
        votes: [J, N].
        level: of the intervals.
        resamples: of the bootstrap.
        seed: of the bootstrap.

    Raises:
        ValueError: there is no answer.
    """
    given = ~votes.isnan()  # [J, N]
    if votes.ndim != 2 or not given.any():
        raise ValueError(f"votes {list(votes.shape)}: [judges, items] with at least one answer are needed")
    kinds = torch.stack([votes == WIN, votes == LOSE, votes == TIE]).double()  # [3, J, N]
    shares = kinds.sum((1, 2)) / given.sum()
    drawn = _resampled(kinds, given.double(), resamples, seed)  # [resamples, 3] or none
    lead = torch.tensor([[1.0], [-1.0], [0.0]], dtype=torch.float64)
    values = torch.cat([shares, shares @ lead])  # [4]
    low, high = _interval(torch.cat([drawn, drawn @ lead], 1), level)
    win, lose, tie, ahead = (Share(*three) for three in zip(values.tolist(), low, high, strict=True))
    sums = votes.nan_to_num(0.0).sum(0)  # [N]
    more, fewer = int((sums > 0).sum()), int((sums < 0).sum())
    found = fleiss_kappa(kinds.sum(1).T)
    return Verdict(int(given.sum()), win, lose, tie, ahead, more, fewer, sign_test(more, fewer), found)


def sign_test(more: int, fewer: int) -> float:
    r"""Exact two-sided p-value of `more` against `fewer` under a fair coin; ties are left out.

    $$p = \min\Big(1,\; 2 \sum_{k=0}^{\min(a, b)} \binom{a + b}{k} 2^{-(a + b)}\Big)$$

    Example:
        >>> sign_test(5, 0)
        0.0625
    """
    n = more + fewer
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(min(more, fewer) + 1)) / 2**n)


def _resampled(kinds: Tensor, given: Tensor, resamples: int, seed: int) -> Tensor:
    """Shares of resampled items, and judges where there are several, [resamples, 3]; samples without answers go."""
    judges, items = given.shape
    if int((given.sum(0) > 0).sum()) < 2:  # of one answered item every sample is the same
        return torch.zeros(0, 3, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    of_items = _times(items, resamples, generator)  # [R, N]
    of_judges = _times(judges, resamples, generator) if judges > 1 else torch.ones(resamples, 1, dtype=torch.float64)
    total = ((of_judges @ given) * of_items).sum(1)  # [R]
    counts = torch.stack([((of_judges @ kind) * of_items).sum(1) for kind in kinds], 1)  # [R, 3]
    return (counts / total[:, None])[total > 0]


def _times(units: int, resamples: int, generator: torch.Generator) -> Tensor:
    """How often each unit is drawn, [resamples, units]."""
    drawn = torch.randint(units, (resamples, units), generator=generator)
    return torch.zeros(resamples, units, dtype=torch.float64).scatter_add_(
        1, drawn, torch.ones_like(drawn, dtype=torch.float64)
    )


def _interval(drawn: Tensor, level: float) -> tuple[list[float | None], list[float | None]]:
    if not len(drawn):
        return [None] * drawn.shape[1], [None] * drawn.shape[1]
    tail = (1 - level) / 2
    low, high = drawn.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64), dim=0).tolist()
    return low, high
