"""A claim of the paper and our result on it: a row of the replication pages.

The rows are listed in `classifier_claims` and `system_claims`; `all_claims` judges them by a folder of results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from repulsive.lab.paper.published import Better, published
from repulsive.lab.paper.result_files import Gain, ResultFiles
from repulsive.lab.paper.verdicts import UNDECIDED, decide, decide_limit, on_data

# Panels of the figure.
ACCURACY, DIST, OVERLAP, ECE, ENTROPY = "accuracy", "dist", "overlap", "ece", "entropy"
BLEU, TEXTS, HEADS, TIME = "bleu", "texts", "heads", "time"


@dataclass(frozen=True)
class ResultClaim:
    """A claim of the paper and our result on it.

    Args:
        claim: what the paper says.
        paper: its gain; None where it gives no number.
        ours: our gain.
        data: what was trained on.
        why: one line.
        panel: panel of the figure, which has one axis for each kind of number.
        name: short name in the figure.
        other_data: "smaller data", "other data", or "" where the data play no part.
        digits: decimals.
        lower: whether a smaller number is better; the verdict then takes the opposite signs.
        within: the claim is that the difference lies within this distance of zero; 0 for other claims.
        is_limit: the claim is that our number is at most the paper's.
        is_control: the difference is from a control, not from plain attention that was tuned on its own.
        is_main: a claim of the paper itself; others are controls and variants, which only the detailed page shows.
    """

    claim: str
    paper: float | None
    ours: Gain
    data: str
    why: str
    panel: str
    name: str
    other_data: str = ""
    digits: int = 2
    lower: bool = False
    within: float = 0.0
    is_limit: bool = False
    is_control: bool = False
    is_main: bool = False

    @property
    def outcome(self) -> str:
        """Whether the claim holds, fails, or cannot be decided."""
        if self.ours.is_one_seed:
            return UNDECIDED
        if self.is_limit and self.paper is not None:
            return decide_limit(self.ours.low, self.ours.high, self.paper)
        better: Better = "same" if self.within else "lower" if self.lower else "higher"
        low, high, p_value = self.ours.low, self.ours.high, self.ours.p_value
        return decide(low, high, self.paper, better=better, within=self.within, p_value=p_value)

    @property
    def verdict(self) -> str:
        """The outcome in words, such as "same claim, smaller data: holds"."""
        return on_data(self.outcome, self.other_data)


Judge = Callable[[ResultFiles], ResultClaim]  # reads our result and judges one claim


def name_count(heads: int) -> str:
    """Return "1 head", "5 heads" and so on."""
    return f"{heads} head{'' if heads == 1 else 's'}"


def gain_of(table: str, data: str, metric: str, ours: str = "svgd", plain: str = "ma") -> float | None:
    """Return the paper's gain, None if it prints none; plain attention is that of Table 1 if the table has none."""
    values = [published().value(table, data, name, metric) for name in (ours, plain)]
    if values[1] is None:
        values[1] = published().value("table1", data, plain, metric)
    return None if values[0] is None or values[1] is None else values[0] - values[1]


def reason_of(ours: Gain, paper: float | None) -> str:
    """Return the reason that follows from an interval: what it contains, or how large it is beside the paper's gain."""
    if ours.low < 0 < ours.high:
        has_gain = paper is not None and paper <= ours.high
        return "contains zero and the paper's gain" if has_gain else "no significant difference"
    if paper is None or paper <= 0 or ours.mean <= 0:
        return ""
    return f"{100 * ours.mean / paper:.0f} % of the paper's amount"
