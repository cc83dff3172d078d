"""Small line charts as SVG; colours and dashes come from the page's style sheet, so that they follow its scheme."""

from __future__ import annotations

import math
from collections.abc import Sequence

from repulsive.diagnostics.report.content import Chart, Series
from repulsive.diagnostics.report.text import escaped

STYLES = 8  # lines told apart by colour and dash; more methods start over
MOST_POINTS = 400  # of a line: more than the chart is wide
_WIDTH, _HEIGHT = 440, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 22, 12, 42


def line_chart(chart: Chart, methods: Sequence[str]) -> str:
    """A figure with one line per series; points that are not finite leave a gap.

    Args:
        chart: what to draw.
        methods: every method of the page; the place of a method in it chooses its colour.
    """
    lines = [(series, _thinned(series.points)) for series in chart.series]
    finite = [point for _, points in lines for point in points if _drawn(point)]
    name = escaped(chart.name)
    if not finite:
        return f'<figure class="chart"><figcaption>{name}</figcaption><p>no finite points</p></figure>\n'
    x_ticks = ticks(min(x for x, _ in finite), max(x for x, _ in finite), 5)
    y_ticks = ticks(min(y for _, y in finite), max(y for _, y in finite), 5)
    x0, x1 = min(x for x, _ in finite), max(max(x for x, _ in finite), x_ticks[-1])
    y0, y1 = y_ticks[0], y_ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x0) / ((x1 - x0) or 1)
        up = (y - y0) / ((y1 - y0) or 1)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    drawn = "".join(_gridline(place(x0, y)[1], _tick_text(y, y_ticks)) for y in y_ticks)
    for x in x_ticks:
        if x >= x0:
            drawn += f'<text class="tick" x="{place(x, y0)[0]:.1f}" y="{_HEIGHT - 24}">{_tick_text(x, x_ticks)}</text>'
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    drawn += f'<text class="tick" x="{middle:.0f}" y="{_HEIGHT - 6}">{escaped(chart.x_name)}</text>'
    for series, points in lines:
        places = [place(*point) if _drawn(point) else None for point in points]
        drawn += f'<path class="line {style_of(series.method, methods)}" d="{_path(places)}"/>'
    return (
        f'<figure class="chart"><figcaption>{name}{_left_out(chart)}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{name}. {_last_values(chart)}">{drawn}</svg>'
        "</figure>\n"
    )


def key(methods: Sequence[str]) -> str:
    """Which line is which method."""
    items = "".join(
        f'<li><svg viewBox="0 0 36 10" aria-hidden="true"><path class="line {style_of(method, methods)}" d="M1 5H35"/>'
        f"</svg> {escaped(method)}</li>"
        for method in methods
    )
    return f'<ul class="lines">{items}</ul>\n'


def style_of(method: str, methods: Sequence[str]) -> str:
    """The class of a method's line."""
    return f"m{methods.index(method) % STYLES}"


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers, at most `most` + 2 of them, from at or below `low` to at or above `high`.

    Example:
        >>> ticks(0.13, 0.58, 5)
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    """
    if high <= low:
        pad = abs(low) / 2 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    every = math.ceil(len(points) / MOST_POINTS)
    return [*points[:-1:every], points[-1]] if every > 1 else list(points)


def _left_out(chart: Chart) -> str:
    longest = max(len(series.points) for series in chart.series)
    every = math.ceil(longest / MOST_POINTS)
    return f" <small>(one point in {every} is drawn)</small>" if every > 1 else ""


def _drawn(point: tuple[float, float]) -> bool:
    return math.isfinite(point[0]) and math.isfinite(point[1])


def _path(places: Sequence[tuple[float, float] | None]) -> str:
    path, pen = "", "M"
    for place in places:
        path += f"{pen}{place[0]:.1f} {place[1]:.1f}" if place else ""
        pen = "L" if place else "M"
    return path


def _gridline(y: float, text: str) -> str:
    return (
        f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
        f'<text class="tick y" x="{_LEFT - 7}" y="{y + 4:.1f}">{text}</text>'
    )


def _tick_text(value: float, among: Sequence[float]) -> str:
    """All ticks of an axis have the decimals that their step needs; from ten thousand on in thousands."""
    step = among[1] - among[0]
    if abs(among[-1]) >= 10_000:
        return f"{value / 1000:,.{0 if step >= 1000 else 1}f}k".replace("-", "−")
    if step < 1e-4:
        return f"{value:.3g}".replace("-", "−")
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    if round(step * 10**digits, 6) % 1:
        digits += 1  # a step of 0.25 needs two
    return f"{value:,.{digits}f}".replace("-", "−")


def _last_values(chart: Chart) -> str:
    said = [_last_value(series) for series in chart.series if any(_drawn(point) for point in series.points)]
    return "Last values: " + "; ".join(said)


def _last_value(series: Series) -> str:
    x, y = next(point for point in reversed(series.points) if _drawn(point))
    return f"{escaped(series.method)} {y:.4g} at {x:g}"
