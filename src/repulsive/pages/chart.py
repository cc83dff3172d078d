"""Small charts as SVG; colours and dashes come from the page's style sheet, so that they follow its scheme."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from repulsive.pages.axes import drawn, extent, tick_text, ticks
from repulsive.pages.panels import Chart, Point, Series
from repulsive.pages.text import escaped

STYLES = 8  # lines told apart by colour and dash; eight more have the same colours and another dash
MOST_POINTS = 400  # of a line: more than the chart is wide
DOT = 7.0  # radius of the largest dot
_SIZE, _SMALL = (440, 250), (290, 200)  # units of the drawing; a small chart is shown smaller, its labels are not
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 22, 12, 42
_LETTER, _SMALL_LETTER = 9.6, 8.3  # width of a digit of a tick; those of a small chart do not grow on a phone
Place = Callable[[float, float], Point]


def line_chart(chart: Chart, methods: Sequence[str], *, small: bool = False) -> str:
    """A figure with all series of a chart; points that are not finite leave a gap.

    Args:
        chart: what to draw.
        methods: every method of the page; the place of a method in it chooses its colour.
        small: one of many side by side.
    """
    name, ends = escaped(chart.name), extent(chart)
    width, height = _SMALL if small else _SIZE
    if ends is None:
        return f'<figure class="chart"><figcaption>{name}</figcaption><p>no finite points</p></figure>\n'
    (least, most), (low, high) = ends
    x_ticks, y_ticks = list(chart.x_ticks) or ticks(least, most, 4 if small else 5), ticks(low, high, 5)
    x0, x1 = least, most if chart.x_limits or chart.x_ticks else max(most, x_ticks[-1])
    x0 = min(x0, x_ticks[0]) if least == most else x0  # one point stands in the middle
    y0, y1 = y_ticks[0], y_ticks[-1]
    y_texts = [tick_text(y, y_ticks) for y in y_ticks]
    left = max(_LEFT, 9 + (_SMALL_LETTER if small else _LETTER) * max(map(len, y_texts)))
    along = math.log2 if chart.x_log else float

    def place(x: float, y: float) -> Point:
        across = (along(x) - along(x0)) / ((along(x1) - along(x0)) or 1)
        up = (y - y0) / ((y1 - y0) or 1)
        return left + across * (width - left - _RIGHT), height - _BOTTOM - up * (height - _TOP - _BOTTOM)

    parts = "".join(
        _gridline(place(x0, y)[1], left, width - _RIGHT, said) for y, said in zip(y_ticks, y_texts, strict=True)
    )
    for x in x_ticks:
        if x0 <= x <= x1:
            said = f"{x:g}" if chart.x_ticks else tick_text(x, x_ticks)
            parts += f'<text class="tick" x="{place(x, y0)[0]:.1f}" y="{height - 24}">{said}</text>'
    middle = (left + width - _RIGHT) / 2
    parts += f'<text class="tick" x="{middle:.0f}" y="{height - 6}">{escaped(chart.x_name)}</text>'
    if chart.diagonal:
        first, last = max(x0, y0), min(x1, y1)
        parts += f'<path class="diagonal" d="{_path([place(first, first), place(last, last)])}"/>'
    parts += "".join(_band(series, methods, place) for series in chart.series)
    parts += "".join(_marks(series, methods, place) for series in chart.series)
    y_name = f" <small>{escaped(chart.y_name)}</small>" if chart.y_name else ""
    note = f'<p class="chart-note">{escaped(chart.note)}</p>' if chart.note else ""
    return (
        f'<figure class="chart"><figcaption>{name}{y_name}{_left_out(chart)}</figcaption>'
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{name}. {_said(chart)}">{parts}</svg>'
        f"{note}</figure>\n"
    )


def key(shown: Sequence[str], methods: Sequence[str], *, dots: bool = False) -> str:
    """Which line, or dot, is which method: those shown, in the colours they have among all methods."""
    items = ""
    for method in shown:
        style = style_of(method, methods)
        line = f'<path class="line {style}" d="M1 5H35"/>'
        mark = f'<circle class="dot {style}" cx="18" cy="5" r="4"/>' if dots else line
        items += f'<li><svg viewBox="0 0 36 10" aria-hidden="true">{mark}</svg> {escaped(method)}</li>'
    return f'<ul class="lines">{items}</ul>\n'


def style_of(method: str, methods: Sequence[str]) -> str:
    """The class of a method's line."""
    place = methods.index(method)
    return f"m{place % STYLES}" + (" again" if place // STYLES % 2 else "")


def _marks(series: Series, methods: Sequence[str], place: Place) -> str:
    style, points = style_of(series.method, methods), _thinned(series.points)
    if series.mark == "bars":
        return f'<path class="bars {style}" d="{_bars(points, place)}"/>'
    if series.mark == "dots" or (series.mark == "line" and sum(map(drawn, series.points)) == 1):
        sizes = series.sizes or [0.36] * len(series.points)
        return "".join(
            f'<circle class="dot {style}" cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="{max(1.6, DOT * math.sqrt(size)):.1f}"/>'
            for at, size in ((place(*p), size) for p, size in zip(series.points, sizes, strict=True) if drawn(p))
        )
    places = [place(*point) if drawn(point) else None for point in points]
    return f'<path class="{series.mark} {style}" d="{_path(places)}"/>'


def _band(series: Series, methods: Sequence[str], place: Place) -> str:
    """The area between low and high; from one point to the next where both are finite."""
    edges = [edge for edge in _thinned(series.band) if all(map(math.isfinite, edge))]
    if not edges:
        return ""
    around = [place(x, high) for x, _, high in edges] + [place(x, low) for x, low, _ in reversed(edges)]
    return f'<path class="band {style_of(series.method, methods)}" d="{_path(around)}Z"/>'


def _bars(points: Sequence[Point], place: Place) -> str:
    """Rectangles from zero up, touching each other; the last point closes the last one."""
    path, ground = "", place(points[0][0], 0)[1]
    for (left, height), (right, _) in pairwise(points):
        if height:
            (x, y), (end, _) = place(left, height), place(right, height)
            path += f"M{x + 0.7:.1f} {ground:.1f}V{y:.1f}H{end - 0.7:.1f}V{ground:.1f}Z"
    return path


def _thinned(points: Sequence[Any]) -> list[Any]:
    every = math.ceil(len(points) / MOST_POINTS)
    return [*points[:-1:every], points[-1]] if every > 1 else list(points)


def _left_out(chart: Chart) -> str:
    longest = max(len(series.points) for series in chart.series)
    every = math.ceil(longest / MOST_POINTS)
    return f" <small>(one point in {every} is drawn)</small>" if every > 1 else ""


def _path(places: Sequence[Point | None]) -> str:
    path, pen = "", "M"
    for place in places:
        path += f"{pen}{place[0]:.1f} {place[1]:.1f}" if place else ""
        pen = "L" if place else "M"
    return path


def _gridline(y: float, start: float, end: float, text: str) -> str:
    return (
        f'<path class="grid" d="M{start:g} {y:.1f}H{end}"/>'
        f'<text class="tick y" x="{start - 7:g}" y="{y + 4:.1f}">{text}</text>'
    )


def _said(chart: Chart) -> str:
    """The chart in words, for those who do not see it; what is drawn to guide the eye is not said."""
    measured = [s for s in chart.series if s.mark != "fit" and any(drawn(point) for point in s.points)]
    if all(series.mark == "line" for series in measured):
        return "Last values: " + "; ".join(_last_value(series) for series in measured)
    tops = [(s.method, max((p for p in s.points if drawn(p)), key=lambda point: point[1])) for s in measured]
    return "Highest: " + "; ".join(f"{escaped(method)} {y:.4g} at {x:.4g}" for method, (x, y) in tops)


def _last_value(series: Series) -> str:
    x, y = next(point for point in reversed(series.points) if drawn(point))
    return f"{escaped(series.method)} {y:.4g} at {x:g}"
