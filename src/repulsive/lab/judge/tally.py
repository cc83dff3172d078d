"""The paper's Table 5 from the answers of judges: win, lose, tie for each criterion."""

from __future__ import annotations

import json
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


@dataclass(frozen=True)
class Tally:
    """What all judges said.

    Args:
        systems: the first, whose wins are counted, and the second.
        judges: their names.
        items: how many there were to judge.
        verdicts: by criterion; None where nobody answered.
        left: share of "left" among answers that are no ties: far from a half, judges favour a side.
    """

    systems: tuple[str, str]
    judges: list[str]
    items: int
    verdicts: dict[str, Verdict | None]
    left: float | None


def tally(key: Key, judges: Sequence[Answers], *, seed: int = 0, resamples: int = 10_000) -> Tally:
    """Undo the blinding and count; `seed` and `resamples` are those of the intervals."""
    verdicts: dict[str, Verdict | None] = {}
    for name in CRITERIA:
        votes = votes_on(name, key, judges)
        verdicts[name] = None if votes.isnan().all() else verdict(votes, resamples=resamples, seed=seed)
    said = [choice for one in judges for answers in one.chosen.values() for choice in answers.values()]
    sides = said.count("left") + said.count("right")
    left = said.count("left") / sides if sides else None
    return Tally(key.systems, [one.judge for one in judges], len(key.ids), verdicts, left)


def votes_on(criterion: str, key: Key, judges: Sequence[Answers]) -> Tensor:
    """WIN, LOSE, TIE of the first system or NaN, [judges, items]."""
    votes = torch.full((len(judges), len(key.ids)), math.nan, dtype=torch.float64)
    for row, one in enumerate(judges):
        for item, said in one.chosen.items():
            if criterion in said:
                choice, side = said[criterion], key.sides[item - 1]
                votes[row, item - 1] = TIE if choice == "tie" else WIN if choice == side else LOSE
    return votes


def as_markdown(found: Tally) -> str:
    """The table, and in words what its numbers are."""
    first, second = map(escaped, found.systems)
    judges = len(found.judges)
    by = f"{_many(judges, 'judge')} ({', '.join(map(escaped, found.judges))})"
    lines = [
        f"**{first}** against {second}: {by}, {_many(found.items, 'item')}",
        "",
    ]
    head = ["Criterion", "Win", "Lose", "Tie", "Win − lose", "Items for : against", "p", "κ", "Answers"]
    rows = []
    for name, one in found.verdicts.items():
        if one is None:
            cells = ["n/a"] * 7 + ["0"]
        else:
            p = "< 0.001" if one.p_value < 0.001 else f"{one.p_value:.3f}"
            kappa = "n/a" if one.agreement.kappa is None else f"{one.agreement.kappa:.2f}".replace("-", "−")
            shares = [_percent(one.win), _percent(one.lose), _percent(one.tie), _percent(one.lead, signed=True)]
            answers = f"{one.answers} of {judges * found.items}"
            cells = [*shares, f"{one.items_for} : {one.items_against}", p, kappa, answers]
        rows.append([name.capitalize(), *cells])
    lines.append(format_table(head, rows))
    resampled = "items" if judges == 1 else "items and judges"
    lines += ["", f"Shares in percent of the answers; in brackets 95 % intervals, a bootstrap over {resampled}."]
    lines.append("p: sign test over items, each for the system more judges chose. κ: Fleiss' kappa between judges.")
    if found.left is not None:
        lines.append(f"Of the answers that are no ties {100 * found.left:.0f} % are for the text on the left.")
    return "\n".join(lines)


def as_json(found: Tally) -> str:
    """The same as data."""
    verdicts: dict[str, Any] = {name: one and asdict(one) for name, one in found.verdicts.items()}
    told = {"systems": list(found.systems), "judges": found.judges, "items": found.items, "left": found.left}
    return json.dumps({**told, "criteria": verdicts}, indent=1)


def _percent(share: Share, *, signed: bool = False) -> str:
    form = "+.0f" if signed else ".0f"
    value = f"{100 * share.value:{form}}"
    if share.low is not None and share.high is not None:
        value += f" [{100 * share.low:{form}}, {100 * share.high:{form}}]"
    return value.replace("-", "−")


def _many(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
