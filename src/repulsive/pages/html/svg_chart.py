"""Charts as SVG. Colours and dashes come from the style sheet, so that they follow its light and dark schemes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from repulsive.pages.axes import extent, is_finite, tick_text, ticks
from repulsive.pages.data.panels import Chart, Point, Series
from repulsive.pages.text import escaped

STYLES = 8  # colours with a dash each; methods 9 to 16 reuse the colours with another dash
MAX_POINTS = 400  # maximum points per line: more than the chart has pixels
MAX_RADIUS = 7.0  # radius of the largest dot
_SIZE, _SMALL = (440, 250), (290, 200)  # in SVG units
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 22, 12, 42
_DIGIT, _SMALL_DIGIT = 9.6, 8.3  # width of a digit of a tick; in small charts the font does not grow on phones
ToPixels = Callable[[float, float], Point]


def svg_chart(chart: Chart, methods: Sequence[str], *, small: bool = False) -> str:
    """Render a chart as a figure; points that are not finite leave a gap.

    Args:
        chart: the data.
        methods: all methods of the page; a method's position determines its colour.
        small: draw a smaller chart, as one of many side by side.
    """
    name, limits = escaped(chart.name), extent(chart)
    width, height = _SMALL if small else _SIZE
    if limits is None:
        return f'<figure class="chart"><figcaption>{name}</figcaption><p>no finite points</p></figure>\n'
    (x_min, x_max), (y_min, y_max) = limits
    x_ticks, y_ticks = list(chart.x_ticks) or ticks(x_min, x_max, 4 if small else 5), ticks(y_min, y_max, 5)
    x0, x1 = x_min, x_max if chart.x_limits or chart.x_ticks else max(x_max, x_ticks[-1])
    x0 = min(x0, x_ticks[0]) if x_min == x_max else x0  # centres a single point
    y0, y1 = y_ticks[0], y_ticks[-1]
    y_texts = [tick_text(y, y_ticks) for y in y_ticks]
    left = max(_LEFT, 9 + (_SMALL_DIGIT if small else _DIGIT) * max(map(len, y_texts)))
    scaled = math.log2 if chart.x_log else float

    def to_pixels(x: float, y: float) -> Point:
        across = (scaled(x) - scaled(x0)) / ((scaled(x1) - scaled(x0)) or 1)
        up = (y - y0) / ((y1 - y0) or 1)
        return left + across * (width - left - _RIGHT), height - _BOTTOM - up * (height - _TOP - _BOTTOM)

    parts = "".join(
        _gridline(to_pixels(x0, y)[1], left, width - _RIGHT, text) for y, text in zip(y_ticks, y_texts, strict=True)
    )
    for x in x_ticks:
        if x0 <= x <= x1:
            text = f"{x:g}" if chart.x_ticks else tick_text(x, x_ticks)
            parts += f'<text class="tick" x="{to_pixels(x, y0)[0]:.1f}" y="{height - 24}">{text}</text>'
    middle = (left + width - _RIGHT) / 2
    parts += f'<text class="tick" x="{middle:.0f}" y="{height - 6}">{escaped(chart.x_name)}</text>'
    if chart.diagonal:
        first, last = max(x0, y0), min(x1, y1)
        parts += f'<path class="diagonal" d="{_path([to_pixels(first, first), to_pixels(last, last)])}"/>'
    parts += "".join(_band(series, methods, to_pixels) for series in chart.series)
    parts += "".join(_marks(series, methods, to_pixels) for series in chart.series)
    y_name = f" <small>{escaped(chart.y_name)}</small>" if chart.y_name else ""
    note = f'<p class="chart-note">{escaped(chart.note)}</p>' if chart.note else ""
    return (
        f'<figure class="chart"><figcaption>{name}{y_name}{_thinning_note(chart)}</figcaption>'
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{name}. {_in_words(chart)}">{parts}</svg>'
        f"{note}</figure>\n"
    )


def legend(shown: Sequence[str], methods: Sequence[str], *, dots: bool = False) -> str:
    """Render a legend.

    Args:
        shown: methods in the legend.
        methods: all methods of the page, which determine the colours.
        dots: show a dot instead of a line for each method.
    """
    items = ""
    for method in shown:
        style = style_of(method, methods)
        line = f'<path class="line {style}" d="M1 5H35"/>'
        mark = f'<circle class="dot {style}" cx="18" cy="5" r="4"/>' if dots else line
        items += f'<li><svg viewBox="0 0 36 10" aria-hidden="true">{mark}</svg> {escaped(method)}</li>'
    return f'<ul class="lines">{items}</ul>\n'


def style_of(method: str, methods: Sequence[str]) -> str:
    """Return the CSS classes of a method's line."""
    index = methods.index(method)
    return f"m{index % STYLES}" + (" again" if index // STYLES % 2 else "")


def _marks(series: Series, methods: Sequence[str], to_pixels: ToPixels) -> str:
    style, points = style_of(series.method, methods), _thinned(series.points)
    if series.mark == "bars":
        return f'<path class="bars {style}" d="{_bars(points, to_pixels)}"/>'
    if series.mark == "dots" or (series.mark == "line" and sum(map(is_finite, series.points)) == 1):
        sizes = series.sizes or [0.36] * len(series.points)
        return "".join(
            _dot(to_pixels(*point), size, style)
            for point, size in zip(series.points, sizes, strict=True)
            if is_finite(point)
        )
    pixels = [to_pixels(*point) if is_finite(point) else None for point in points]
    return f'<path class="{series.mark} {style}" d="{_path(pixels)}"/>'


def _dot(centre: Point, size: float, style: str) -> str:
    radius = max(1.6, MAX_RADIUS * math.sqrt(size))
    return f'<circle class="dot {style}" cx="{centre[0]:.1f}" cy="{centre[1]:.1f}" r="{radius:.1f}"/>'


def _band(series: Series, methods: Sequence[str], to_pixels: ToPixels) -> str:
    """Draw the area between low and high, skipping points that are not finite."""
    edges = [edge for edge in _thinned(series.band) if all(map(math.isfinite, edge))]
    if not edges:
        return ""
    outline = [to_pixels(x, high) for x, _, high in edges] + [to_pixels(x, low) for x, low, _ in reversed(edges)]
    return f'<path class="band {style_of(series.method, methods)}" d="{_path(outline)}Z"/>'


def _bars(points: Sequence[Point], to_pixels: ToPixels) -> str:
    """Draw rectangles from zero up; the last point is the right edge of the last bar."""
    path, ground = "", to_pixels(points[0][0], 0)[1]
    for (left, height), (right, _) in pairwise(points):
        if height:
            (x, y), (end, _) = to_pixels(left, height), to_pixels(right, height)
            path += f"M{x + 0.7:.1f} {ground:.1f}V{y:.1f}H{end - 0.7:.1f}V{ground:.1f}Z"
    return path


def _thinned(points: Sequence[Any]) -> list[Any]:
    every = math.ceil(len(points) / MAX_POINTS)
    return [*points[:-1:every], points[-1]] if every > 1 else list(points)


def _thinning_note(chart: Chart) -> str:
    longest = max(len(series.points) for series in chart.series)
    every = math.ceil(longest / MAX_POINTS)
    return f" <small>(one point in {every} is drawn)</small>" if every > 1 else ""


def _path(pixels: Sequence[Point | None]) -> str:
    path, pen = "", "M"
    for pixel in pixels:
        path += f"{pen}{pixel[0]:.1f} {pixel[1]:.1f}" if pixel else ""
        pen = "L" if pixel else "M"
    return path


def _gridline(y: float, start: float, end: float, text: str) -> str:
    return (
        f'<path class="grid" d="M{start:g} {y:.1f}H{end}"/>'
        f'<text class="tick y" x="{start - 7:g}" y="{y + 4:.1f}">{text}</text>'
    )


def _in_words(chart: Chart) -> str:
    """Describe the measured data for screen readers; fitted lines are left out."""
    measured = [s for s in chart.series if s.mark != "fit" and any(is_finite(point) for point in s.points)]
    if all(series.mark == "line" for series in measured):
        return "Last values: " + "; ".join(_last_value(series) for series in measured)
    peaks = [(s.method, max((p for p in s.points if is_finite(p)), key=lambda point: point[1])) for s in measured]
    return "Highest values: " + "; ".join(f"{escaped(method)} {y:.4g} at {x:.4g}" for method, (x, y) in peaks)


def _last_value(series: Series) -> str:
    x, y = next(point for point in reversed(series.points) if is_finite(point))
    return f"{escaped(series.method)} {y:.4g} at {x:g}"
