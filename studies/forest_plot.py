"""Forest plots as SVG: differences with their intervals, one row each, in light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

LEFT, RIGHT, TOP, STEP, WIDTH = 210, 690, 54, 24, 720
STYLE = """
  text { font-family: sans-serif; font-size: 12px; fill: #202020 }
  .note { fill: #5a5a55 } .heading { font-weight: bold }
  .card { fill: #fbfbf8 } .zero { stroke: #5a5a55 } .grid { stroke: #d5d5cf }
  .bar { stroke: #00796b; stroke-width: 2 } .dot, .arrow { fill: #00796b }
  .control .bar { stroke: #5e35b1 } .control .dot, .control .arrow { fill: #5e35b1 }
  .paper { fill: none; stroke: #d84315; stroke-width: 1.6 }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f0f0 } .note { fill: #b4b8c4 } .card { fill: #23262f }
    .zero { stroke: #b4b8c4 } .grid { stroke: #3c404c }
    .bar { stroke: #4db6ac } .dot, .arrow { fill: #4db6ac } .paper { stroke: #ff8a65 }
    .control .bar { stroke: #b39ddb } .control .dot, .control .arrow { fill: #b39ddb }
  }
"""


@dataclass(frozen=True)
class Row:
    """A row of a forest plot.

    Args:
        name: text on the left.
        interval: difference, lower and upper end; None: the row is a heading.
        paper: the paper's difference, a hollow diamond.
        is_control: the difference from a control, in another colour with a square.
    """

    name: str
    interval: tuple[float, float, float] | None = None
    paper: float | None = None
    is_control: bool = False


def draw_forest(
    title: str, rows: Sequence[Row], edges: tuple[float, float], caption: str, legend: Sequence[str]
) -> str:
    """Draw a forest plot.

    Args:
        title: for screen readers.
        rows: from top to bottom.
        edges: ends of the axis; arrows mark intervals that are cut off.
        caption: below the axis.
        legend: SVG elements at the top.
    """
    bottom = TOP + STEP * len(rows)
    height = bottom + 40
    low_edge, high_edge = edges

    def x(value: float) -> float:
        return LEFT + (min(max(value, low_edge), high_edge) - low_edge) / (high_edge - low_edge) * (RIGHT - LEFT)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'role="img">',
        f"<title>{escape(title, quote=False)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="card" width="{WIDTH}" height="{height}" rx="6"/>',
        *legend,
    ]
    for tick in range(math.ceil(low_edge), math.floor(high_edge) + 1):
        kind = "zero" if tick == 0 else "grid"
        parts.append(f'<line class="{kind}" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{TOP - 12}" y2="{bottom}"/>')
        label = f"{tick:+d}" if tick else "0"
        parts.append(f'<text class="note" x="{x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{label}</text>')
    parts.append(f'<text class="note" x="{LEFT}" y="{bottom + 32}">{escape(caption, quote=False)}</text>')
    for index, row in enumerate(rows):
        y = TOP + STEP * index + 4
        kind = "" if row.interval else ' class="heading"'
        parts.append(
            f'<text{kind} x="{LEFT - 12}" y="{y + 4}" text-anchor="end">{escape(row.name, quote=False)}</text>'
        )
        if row.interval is None:
            continue
        mean, low, high = row.interval
        marks = [f'<line class="bar" x1="{x(low):.1f}" x2="{x(high):.1f}" y1="{y}" y2="{y}"/>']
        if low < low_edge:
            marks.append(f'<path class="arrow" d="M {LEFT - 7} {y} l 9 -5 v 10 z"/>')
        if high > high_edge:
            marks.append(f'<path class="arrow" d="M {RIGHT + 7} {y} l -9 -5 v 10 z"/>')
        marks.append(dot(x(mean), y, row.is_control))
        parts += ['<g class="control">', *marks, "</g>"] if row.is_control else marks
        if row.paper is not None:
            parts.append(diamond(x(row.paper), y))
    return "\n".join([*parts, "</svg>"]) + "\n"


def dot(x: float, y: float, is_control: bool = False) -> str:
    """Return the mark of a mean: a circle, for controls a square."""
    if is_control:
        return f'<rect class="dot" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"/>'
    return f'<circle class="dot" cx="{x:.1f}" cy="{y}" r="4"/>'


def diamond(x: float, y: float) -> str:
    """Return the mark of the paper's number."""
    return f'<path class="paper" d="M {x:.1f} {y - 6} l 6 6 l -6 6 l -6 -6 z"/>'
