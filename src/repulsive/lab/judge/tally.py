"""Compute the paper's Table 5 from the answers of judges: wins, losses and ties for each criterion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from repulsive.lab.judge.answers import Answers
from repulsive.lab.judge.criteria import CRITERIA
from repulsive.lab.judge.key import Key
from repulsive.lab.judge.votes import LOSE, TIE, WIN, Share, Verdict, verdict
from repulsive.safety.markdown import escaped, format_table
from repulsive.terminal.table import Table


@dataclass(frozen=True)
class Tally:
    """Results of all judges.

    Args:
        systems: names of the first system, whose wins are counted, and of the second.
        judges: names of the judges.
        items: number of items on the page.
        verdicts: criterion -> result; None without answers.
        left: share of "left" among answers other than ties; a value far from 0.5 means that judges prefer a side.
    """

    systems: tuple[str, str]
    judges: list[str]
    items: int
    verdicts: dict[str, Verdict | None]
    left: float | None


def tally(key: Key, judges: Sequence[Answers], *, resamples: int = 10_000) -> Tally:
    """Undo the blinding and count answers; `resamples` is for the bootstrap intervals."""
    verdicts: dict[str, Verdict | None] = {}
    for name in CRITERIA:
        votes = votes_on(name, key, judges)
        verdicts[name] = None if votes.isnan().all() else verdict(votes, resamples=resamples)
    choices = [choice for one in judges for answers in one.chosen.values() for choice in answers.values()]
    decided = choices.count("left") + choices.count("right")
    left = choices.count("left") / decided if decided else None
    return Tally(key.systems, [one.judge for one in judges], len(key.ids), verdicts, left)


def votes_on(criterion: str, key: Key, judges: Sequence[Answers]) -> Tensor:
    """Return WIN, LOSE or TIE of the first system, or NaN without an answer: [judges, items]."""
    votes = torch.full((len(judges), len(key.ids)), math.nan, dtype=torch.float64)
    for row, one in enumerate(judges):
        for item, answers in one.chosen.items():
            if criterion in answers:
                choice, side = answers[criterion], key.sides[item - 1]
                votes[row, item - 1] = TIE if choice == "tie" else WIN if choice == side else LOSE
    return votes


def as_markdown(result: Tally) -> str:
    """Format the table in Markdown, with an explanation of its columns."""
    first, second = map(escaped, result.systems)
    judges = len(result.judges)
    by = f"{_many(judges, 'judge')} ({', '.join(map(escaped, result.judges))})"
    lines = [
        f"**{first}** versus {second}: {by}, {_many(result.items, 'item')}",
        "",
    ]
    head = ["Criterion", "Win", "Lose", "Tie", "Win − lose", "Items won : lost", "p", "κ", "Answers"]
    rows = []
    for name, one in result.verdicts.items():
        if one is None:
            cells = ["n/a"] * 7 + ["0"]
        else:
            p = "< 0.001" if one.p_value < 0.001 else f"{one.p_value:.3f}"
            kappa = "n/a" if one.agreement.kappa is None else f"{one.agreement.kappa:.2f}".replace("-", "−")
            shares = [_percent(one.win), _percent(one.lose), _percent(one.tie), _percent(one.lead, signed=True)]
            answers = f"{one.answers} of {judges * result.items}"
            cells = [*shares, f"{one.items_for} : {one.items_against}", p, kappa, answers]
        rows.append([name.capitalize(), *cells])
    lines.append(format_table(head, rows))
    resampled = "items" if judges == 1 else "items and judges"
    lines += [
        "",
        f"Win, lose, tie: percent of all answers, with 95 % confidence intervals (bootstrap over {resampled}).",
    ]
    lines.append("p: sign test over items; the majority of judges decides an item. κ: Fleiss' kappa between judges.")
    if result.left is not None:
        lines.append(f"Without ties, {100 * result.left:.0f} % of the answers prefer the text on the left.")
    return "\n".join(lines)


def terminal_tables(result: Tally, full: bool = False) -> list[Table | str]:
    """Make the table for a terminal, with a line above and below.

    Args:
        result: results of all judges.
        full: show confidence intervals, items, agreement and answers.
    """
    first, second = result.systems
    judges = len(result.judges)
    rows = []
    for name, one in result.verdicts.items():
        if one is None:
            rows.append([name, *["n/a"] * (6 if full else 4)])
            continue
        p_value = "< 0.001" if one.p_value < 0.001 else f"{one.p_value:.3f}"
        shares = [_percent(share, interval=full) for share in (one.win, one.lose, one.tie)]
        kappa = "n/a" if one.agreement.kappa is None else f"{one.agreement.kappa:.2f}"
        more = [kappa, f"{one.answers} of {judges * result.items}"] if full else []
        rows.append([name, *shares, p_value, *more])
    titles = ["criterion", "win %", "lose %", "tie %", "p", *(["kappa", "answers"] if full else [])]
    legend = "p: sign test over items; the majority of judges decides an item."
    if full:
        legend += " Brackets: 95 % confidence intervals. kappa: Fleiss' kappa between judges."
    side = (
        "" if result.left is None else f" {100 * result.left:.0f} % of the answers without ties prefer the left text."
    )
    head = f"{first} versus {second}: {_many(judges, 'judge')}, {_many(result.items, 'item')}"
    return [Table(titles, rows, head), legend + side]


def as_data(result: Tally) -> dict[str, Any]:
    """Convert the results to plain values for JSON."""
    verdicts: dict[str, Any] = {name: one and asdict(one) for name, one in result.verdicts.items()}
    fields = {"systems": list(result.systems), "judges": result.judges, "items": result.items, "left": result.left}
    return {**fields, "criteria": verdicts}


def _percent(share: Share, *, signed: bool = False, interval: bool = True) -> str:
    form = "+.0f" if signed else ".0f"
    value = f"{100 * share.value:{form}}"
    if interval and share.low is not None and share.high is not None:
        value += f" [{100 * share.low:{form}}, {100 * share.high:{form}}]"
    return value.replace("-", "−")


def _many(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
