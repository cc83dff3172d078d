"""Verdicts on the paper's claims. Each follows from a confidence interval and a p-value; none is written by hand.

On the paper's own data a claim is confirmed or not. On smaller or other data the same claim holds, fails, or we cannot
say: `decide` is the one rule for that, for new runs and for the committed results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from repulsive.lab.paper.mismatch import Mismatch
from repulsive.lab.paper.published import Better, Claim
from repulsive.lab.runs.results import SIGNIFICANT
from repulsive.metrics.compare import Comparison

CONFIRMED, NOT_CONFIRMED, NOT_TESTED = "confirmed", "not confirmed", "not tested"
HOLDS, FAILS, UNDECIDED = "holds", "fails", "cannot say"
OUTCOMES = {  # outcome -> title of its column in summaries
    CONFIRMED: CONFIRMED,
    NOT_CONFIRMED: NOT_CONFIRMED,
    HOLDS: "other data: holds",
    FAILS: "other data: fails",
    UNDECIDED: UNDECIDED,
    NOT_TESTED: NOT_TESTED,
}


@dataclass(frozen=True)
class Finding:
    """A claim of the paper and our verdict on it.

    Args:
        claim: the claim.
        outcome: `CONFIRMED` or `NOT_CONFIRMED` on the paper's data, `HOLDS`, `FAILS` or `UNDECIDED` on others,
            `NOT_TESTED` without a comparison or on toy data.
        reason: reason of the verdict in a few words.
        observed: the result of these runs, on any data: "higher", "lower", "no significant difference", "within ±..."
            or "not within ±..."; "" without a comparison.
        comparison: comparison of the claim's two rows, first - second.
        data: kind of the data if they are not the paper's: "smaller data" or "other data".
    """

    claim: Claim
    outcome: str
    reason: str
    observed: str = ""
    comparison: Comparison | None = None
    data: str = ""

    @property
    def verdict(self) -> str:
        """The outcome in words, such as "same claim, smaller data: holds"."""
        return on_data(self.outcome, self.data)


def decide(
    low: float,
    high: float,
    gain: float | None = None,
    *,
    better: Better = "higher",
    within: float = 0.0,
    p_value: float = math.nan,
) -> str:
    """Decide a claim by the 95 % interval of a difference that was not measured on the paper's data.

    | outcome | "higher" ("lower": with the opposite signs) | "same" |
    | --- | --- | --- |
    | holds | low > 0, and p is at most 0.05 or there is no test | the interval lies within ±`within` |
    | fails | high < 0, or high < gain unless low > 0 | the interval lies outside ±`within` |
    | cannot say | otherwise | otherwise |

    Args:
        low: lower end of the interval.
        high: upper end of the interval.
        gain: the paper's difference; None if it prints none.
        better: what is claimed.
        within: margin of "same".
        p_value: p-value of the difference; NaN if there is no test.
    """
    if better == "same":
        return HOLDS if -within <= low and high <= within else FAILS if low > within or high < -within else UNDECIDED
    if better == "lower":
        low, high, gain = -high, -low, None if gain is None else -gain
    if low > 0:
        return HOLDS if _is_tested(p_value) else UNDECIDED
    return FAILS if high < max(0.0, gain or 0.0) else UNDECIDED


def decide_limit(low: float, high: float, limit: float) -> str:
    """Decide a claim that a quantity is at most `limit`, by the quantity's 95 % interval."""
    return HOLDS if high <= limit else FAILS if low > limit else UNDECIDED


def on_data(outcome: str, data: str) -> str:
    """Add the kind of data to an outcome: "same claim, smaller data: holds"."""
    return f"same claim, {data}: {outcome}" if data and outcome in (HOLDS, FAILS) else outcome


def judge(claim: Claim, comparison: Comparison | None, mismatch: Mismatch | None, missing: str = "") -> Finding:
    """Judge a claim of the paper by a comparison of runs.

    A difference is significant if its interval excludes zero and p is at most 0.05, as everywhere in this package. If
    p is NaN, there is no test and the interval decides. One seed does not show how runs vary, so it confirms nothing.

    Args:
        claim: the claim.
        comparison: comparison of the claim's two rows, first - second; None if it could not be computed.
        mismatch: why the data are not the paper's; None if they are.
        missing: why there is no comparison.
    """
    if comparison is None:
        return Finding(claim, NOT_TESTED, missing or "not run, or only one seed and no test items to resample")
    is_significant = _is_tested(comparison.p_value) and (comparison.low > 0 or comparison.high < 0)
    if claim.better == "same":
        holds = -claim.within <= comparison.low and comparison.high <= claim.within
        observed = f"{'' if holds else 'not '}within ±{claim.within:g}"
    else:
        direction = "higher" if comparison.difference > 0 else "lower"
        observed = direction if is_significant else "no significant difference"
        holds = observed == claim.better
    reason = _reason(comparison, is_significant)
    is_single = comparison.seeds < 2 and comparison.over == "items"
    if is_single:
        reason = "only one seed: variation between runs is unknown"
    if mismatch is None:
        outcome = CONFIRMED if holds and not is_single else NOT_CONFIRMED
        return Finding(claim, outcome, reason, observed, comparison)
    if not mismatch.kind:
        return Finding(claim, NOT_TESTED, mismatch.reason, observed, comparison)
    low, high, p_value = comparison.low, comparison.high, comparison.p_value
    outcome = decide(low, high, claim.gain, better=claim.better, within=claim.within, p_value=p_value)
    if is_single:
        outcome = UNDECIDED
    reasons = "; ".join(text for text in (mismatch.reason, reason) if text)
    return Finding(claim, outcome, reasons, observed, comparison, mismatch.kind)


def judge_unseen(claim: Claim, mismatch: Mismatch | None, reason: str) -> Finding:
    """Judge a claim whose difference does not exist in finished runs, for a reason that speaks against the claim."""
    if mismatch is None:
        return Finding(claim, NOT_CONFIRMED, reason)
    outcome = UNDECIDED if mismatch.kind else NOT_TESTED
    return Finding(claim, outcome, f"{mismatch.reason}; {reason}", data=mismatch.kind)


def _is_tested(p_value: float) -> bool:
    return math.isnan(p_value) or p_value <= SIGNIFICANT


def _reason(comparison: Comparison, is_significant: bool) -> str:
    smallest = 2 ** (1 - comparison.seeds)
    if not is_significant and comparison.over in ("seeds", "both") and smallest > SIGNIFICANT:
        return f"with {comparison.seeds} seeds p cannot be below {smallest:g}"
    return "" if math.isnan(comparison.p_value) else f"p = {comparison.p_value:.3f}"
