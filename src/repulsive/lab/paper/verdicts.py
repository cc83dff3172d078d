"""Verdicts on the paper's claims. Each follows from a confidence interval and a p-value; none is written by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass

from repulsive.lab.paper.published import Claim
from repulsive.lab.runs.results import SIGNIFICANT
from repulsive.metrics.compare import Comparison

CONFIRMED, NOT_CONFIRMED, NOT_TESTED = "confirmed", "not confirmed", "not tested on the same data"
KINDS = (CONFIRMED, NOT_CONFIRMED, NOT_TESTED)


@dataclass(frozen=True)
class Finding:
    """A claim of the paper and our verdict on it.

    Args:
        claim: the claim.
        verdict: `CONFIRMED`, `NOT_CONFIRMED` or `NOT_TESTED`.
        reason: reason of the verdict in a few words.
        observed: the result of these runs, on any data: "higher", "lower", "no significant difference", "within ±..."
            or "not within ±..."; "" without a comparison.
        comparison: comparison of the claim's two rows, first - second.
    """

    claim: Claim
    verdict: str
    reason: str
    observed: str = ""
    comparison: Comparison | None = None


def judge(claim: Claim, comparison: Comparison | None, mismatch: str, missing: str = "") -> Finding:
    """Judge a claim of the paper by a comparison of runs.

    A difference is significant if its interval excludes zero and p is at most 0.05, as everywhere in this package. If
    p is NaN, there is no test and the interval decides. One seed does not show how runs vary, so it confirms nothing.

    Args:
        claim: the claim.
        comparison: comparison of the claim's two rows, first - second; None if it could not be computed.
        mismatch: why the data are not the paper's; "" if they are.
        missing: why there is no comparison.
    """
    if comparison is None:
        return Finding(claim, NOT_TESTED, missing or "not run, or only one seed and no test items to resample")
    is_tested = math.isnan(comparison.p_value) or comparison.p_value <= SIGNIFICANT
    is_significant = is_tested and (comparison.low > 0 or comparison.high < 0)
    if claim.better == "same":
        holds = -claim.within <= comparison.low and comparison.high <= claim.within
        observed = f"{'' if holds else 'not '}within ±{claim.within:g}"
    else:
        direction = "higher" if comparison.difference > 0 else "lower"
        observed = direction if is_significant else "no significant difference"
        holds = observed == claim.better
    if mismatch:
        return Finding(claim, NOT_TESTED, mismatch, observed, comparison)
    if comparison.seeds < 2 and comparison.over == "items":
        return Finding(claim, NOT_CONFIRMED, "only one seed: variation between runs is unknown", observed, comparison)
    verdict = CONFIRMED if holds else NOT_CONFIRMED
    return Finding(claim, verdict, _reason(comparison, is_significant), observed, comparison)


def _reason(comparison: Comparison, is_significant: bool) -> str:
    smallest = 2 ** (1 - comparison.seeds)
    if not is_significant and comparison.over in ("seeds", "both") and smallest > SIGNIFICANT:
        return f"with {comparison.seeds} seeds p cannot be below {smallest:g}"
    return "" if math.isnan(comparison.p_value) else f"p = {comparison.p_value:.3f}"
