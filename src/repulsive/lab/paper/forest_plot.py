"""Forest plots as SVG: differences with their intervals, one row each, in light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

TOP = 54
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


@dataclass(frozen=True)
class Panel:
    """Rows on one axis.

    Args:
        heading: text above the rows; "" for none.
        rows: from top to bottom.
        edges: ends of the axis; arrows mark intervals that are cut off, and a mean outside is written as a number.
        step: distance between ticks.
    """

    heading: str
    rows: Sequence[Row]
    edges: tuple[float, float]
    step: float = 1.0


@dataclass(frozen=True)
class Geometry:
    """Where a plot has its axis and its rows, in pixels.

    Args:
        left: left end of the axis; names of rows end before it.
        right: right end of the axis.
        width: of the picture.
        step: distance between rows.
    """

    left: int
    right: int
    width: int
    step: int


WIDE = Geometry(210, 690, 720, 24)
NARROW = Geometry(170, 430, 456, 21)  # readable at the width of a phone


def draw_forest(
    title: str, rows: Sequence[Row], edges: tuple[float, float], caption: str, legend: Sequence[str]
) -> str:
    """Draw a forest plot with one axis.

    Args:
        title: for screen readers.
        rows: from top to bottom.
        edges: ends of the axis; arrows mark intervals that are cut off.
        caption: below the axis.
        legend: SVG elements at the top.
    """
    axis, rest = _draw_panel(Panel("", rows, edges), TOP, WIDE)
    bottom = TOP + WIDE.step * len(rows)
    return _draw(title, [*axis, _caption(caption, WIDE.left, bottom + 32), *rest], legend, WIDE.width, bottom + 40)


def draw_panels(title: str, panels: Sequence[Panel], captions: Sequence[str], legend: Sequence[str]) -> str:
    """Draw a narrow forest plot with one axis for each panel.

    Args:
        title: for screen readers.
        panels: from top to bottom; those without rows are left out.
        captions: lines below the last axis.
        legend: SVG elements at the top.
    """
    parts, top = [], TOP
    for panel in panels:
        if panel.rows:
            parts.append(f'<text class="heading" x="12" y="{top + 4}">{escape(panel.heading, quote=False)}</text>')
            top += 30
            axis, rest = _draw_panel(panel, top, NARROW)
            parts += [*axis, *rest]
            top += NARROW.step * len(panel.rows) + 42
    for number, caption in enumerate(captions):
        parts.append(_caption(caption, 12, top + 16 * number))
    return _draw(title, parts, legend, NARROW.width, top + 16 * len(captions))


def _draw(title: str, parts: Sequence[str], legend: Sequence[str], width: int, height: int) -> str:
    opening = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'role="img">',
        f"<title>{escape(title, quote=False)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="card" width="{width}" height="{height}" rx="6"/>',
    ]
    return "\n".join([*opening, *legend, *parts, "</svg>"]) + "\n"


def _caption(text: str, x: int, y: int) -> str:
    return f'<text class="note" x="{x}" y="{y}">{escape(text, quote=False)}</text>'


def _draw_panel(panel: Panel, top: int, shape: Geometry) -> tuple[list[str], list[str]]:
    """Draw the axis of a panel, and its rows."""
    low_edge, high_edge = panel.edges
    left, right, bottom = shape.left, shape.right, top + shape.step * len(panel.rows)

    def x(value: float) -> float:
        return left + (min(max(value, low_edge), high_edge) - low_edge) / (high_edge - low_edge) * (right - left)

    axis = []
    for number in range(math.ceil(low_edge / panel.step), math.floor(high_edge / panel.step) + 1):
        tick = number * panel.step
        kind = "zero" if tick == 0 else "grid"
        axis.append(f'<line class="{kind}" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{top - 12}" y2="{bottom}"/>')
        label = f"{tick:+g}" if tick else "0"
        axis.append(f'<text class="note" x="{x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{label}</text>')
    parts = []
    for index, row in enumerate(panel.rows):
        y = top + shape.step * index + 4
        kind = "" if row.interval else ' class="heading"'
        name = escape(row.name, quote=False)
        parts.append(f'<text{kind} x="{left - 12}" y="{y + 4}" text-anchor="end">{name}</text>')
        if row.interval is None:
            continue
        mean, low, high = row.interval
        marks = [f'<line class="bar" x1="{x(low):.1f}" x2="{x(high):.1f}" y1="{y}" y2="{y}"/>']
        if low < low_edge:
            marks.append(f'<path class="arrow" d="M {left - 7} {y} l 9 -5 v 10 z"/>')
        if high > high_edge:
            marks.append(f'<path class="arrow" d="M {right + 7} {y} l -9 -5 v 10 z"/>')
        if low_edge <= mean <= high_edge:
            marks.append(dot(x(mean), y, row.is_control))
        else:  # the number itself, beside the arrow
            place, anchor = (left + 8, "start") if mean < low_edge else (right - 8, "end")
            marks.append(f'<text class="note" x="{place}" y="{y + 4}" text-anchor="{anchor}">{mean:+.1f}</text>')
        parts += ['<g class="control">', *marks, "</g>"] if row.is_control else marks
        if row.paper is not None:
            parts.append(diamond(x(row.paper), y))
    return axis, parts


def dot(x: float, y: float, is_control: bool = False) -> str:
    """Return the mark of a mean: a circle, for controls a square."""
    if is_control:
        return f'<rect class="dot" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"/>'
    return f'<circle class="dot" cx="{x:.1f}" cy="{y}" r="4"/>'


def diamond(x: float, y: float) -> str:
    """Return the mark of the paper's number."""
    return f'<path class="paper" d="M {x:.1f} {y - 6} l 6 6 l -6 6 l -6 -6 z"/>'
