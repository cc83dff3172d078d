"""The claims that the committed results decide, as a table, as JSON and as a forest plot."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from repulsive.lab.engine.files import write_text
from repulsive.lab.paper.forest_plot import Panel, Row, diamond, dot, draw_panels
from repulsive.lab.paper.result_claims import (
    ACCURACY,
    BLEU,
    DIST,
    ECE,
    ENTROPY,
    HEADS,
    OVERLAP,
    TEXTS,
    TIME,
    ResultClaim,
)
from repulsive.lab.paper.verdicts import FAILS, HOLDS, UNDECIDED
from repulsive.safety.markdown import format_table
from repulsive.terminal.table import Table

ID = "claims"
TITLES = ("claim", "paper", "ours [95 % CI]", "our data", "verdict", "why")
UNITS = "Accuracy, ECE, OE, GLUE, metrics of texts and shares of heads are in points."
PANELS = {  # panel -> heading, ends of the axis, distance of ticks
    ACCURACY: ("Accuracy of classifiers, points", (-2.0, 3.0), 1.0),
    DIST: ("Diversity of heads, Dist", (-0.5, 1.5), 0.5),
    OVERLAP: ("Overlap of heads: lower is better", (-0.1, 0.1), 0.05),
    ECE: ("Calibration and overconfidence, points: lower is better", (-3.0, 3.0), 1.0),
    ENTROPY: ("Entropy on texts of another dataset, nats", (-0.1, 0.1), 0.05),
    BLEU: ("BLEU of translations and texts; GLUE, points", (-5.0, 3.0), 1.0),
    TEXTS: ("Texts about graphs, points", (-40.0, 40.0), 20.0),
    HEADS: ("Share of heads that can be removed, points: lower is better", (-30.0, 20.0), 10.0),
    TIME: ("Step time, percent: lower is better", (-5.0, 15.0), 5.0),
}
CAPTIONS = (
    "Differences from plain attention, or from what follows the minus sign, with",
    "95 % intervals. Arrows: the interval is longer than the axis.",
)


def cells(claim: ResultClaim) -> list[str]:
    """Format the cells of a row, in the order of `TITLES`."""
    paper = "" if claim.paper is None else f"{claim.paper:+.{claim.digits}f}"
    return [claim.claim, paper, claim.ours.text(claim.digits), claim.data, claim.verdict, claim.why]


def main_claims(claims: Sequence[ResultClaim]) -> list[ResultClaim]:
    """Select the claims of the paper itself, without controls and variants."""
    return [claim for claim in claims if claim.is_main]


def as_markdown(claims: Sequence[ResultClaim], *, short: bool = False) -> str:
    """Format the claims as a Markdown table; `short` verdicts do not repeat that the data are not the paper's."""
    rows = [cells(claim) for claim in claims]
    if short:
        verdict = TITLES.index("verdict")
        rows = [[*row[:verdict], claim.outcome, *row[verdict + 1 :]] for row, claim in zip(rows, claims, strict=True)]
    return format_table(TITLES, rows)


def tables(claims: Sequence[ResultClaim], full: bool = False) -> list[Table | str]:
    """Make tables for a terminal: the main claims, then the others, each with the number of rows by outcome, and units.

    Args:
        claims: the claims.
        full: also show our data and the reasons.
    """
    shown = [index for index, title in enumerate(TITLES) if full or title not in ("our data", "why")]
    blocks: list[Table | str] = []
    for title, is_main in (("main claims", True), ("other claims, controls and variants", False)):
        chosen = [claim for claim in claims if claim.is_main == is_main]
        if chosen:
            rows = [[cells(claim)[i] for i in shown] for claim in chosen]
            counts = Counter(claim.outcome for claim in chosen)
            summary = ", ".join(f"{outcome}: {counts[outcome]}" for outcome in (HOLDS, FAILS, UNDECIDED))
            blocks += [Table([TITLES[i] for i in shown], rows, title), f"Rows: {len(chosen)}; {summary}."]
    return [*blocks, UNITS]


def as_data(claims: Sequence[ResultClaim]) -> list[dict[str, Any]]:
    """Convert the claims to plain values for JSON, with numbers at full precision."""
    return [
        {
            "claim": claim.claim,
            "paper": claim.paper,
            "difference": claim.ours.mean,
            "low": claim.ours.low,
            "high": claim.ours.high,
            "p_value": None if math.isnan(claim.ours.p_value) else claim.ours.p_value,  # JSON has no NaN
            "better": "same" if claim.within else "lower" if claim.lower or claim.is_limit else "higher",
            "is_control": claim.is_control,
            "is_main": claim.is_main,
            "data": claim.data,
            "kind": claim.other_data,
            "outcome": claim.outcome,
            "verdict": claim.verdict,
            "why": claim.why,
        }
        for claim in claims
    ]


def draw(claims: Sequence[ResultClaim], panels: Sequence[str] = ()) -> str:
    """Draw the forest plot of claims as SVG: our intervals, and the paper's gains as hollow diamonds.

    Args:
        claims: the claims.
        panels: names of panels to draw; empty: all.
    """
    drawn = [
        Panel(heading, [_row(claim) for claim in claims if claim.panel == name], edges, step)
        for name, (heading, edges, step) in PANELS.items()
        if not panels or name in panels
    ]
    has_controls = any(row.is_control for panel in drawn for row in panel.rows)
    title = "Gains of repulsive attention: the paper's and ours"
    return draw_panels(title, drawn, CAPTIONS, _legend(has_controls))


def write(claims: Sequence[ResultClaim], out: Path) -> list[Path]:
    """Write `claims.md`, `claims.json` and `claims.svg` into a folder.

    Raises:
        RunError: a file cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    texts = {
        ".md": as_markdown(claims) + "\n",
        ".json": json.dumps(as_data(claims), indent=1) + "\n",
        ".svg": draw(claims),
    }
    paths = []
    for suffix, text in texts.items():
        paths.append(out / f"{ID}{suffix}")
        write_text(paths[-1], text)
    return paths


def _legend(has_controls: bool) -> list[str]:
    marks, x = [f'{dot(18, 20)}<text x="28" y="24">ours</text>'], 82
    if has_controls:
        control = dot(x, 20, is_control=True)
        marks.append(f'<g class="control">{control}</g><text x="{x + 10}" y="24">ours, against a control</text>')
        x = 246
    return [*marks, f'{diamond(x, 20)}<text x="{x + 12}" y="24">the paper, its own data</text>']


def _row(claim: ResultClaim) -> Row:
    return Row(claim.name, (claim.ours.mean, claim.ours.low, claim.ours.high), claim.paper, claim.is_control)
