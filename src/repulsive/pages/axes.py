"""Limits and tick marks of chart axes, the same on pages and in figures for papers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from repulsive.pages.data.panels import Chart, Point


def ticks(low: float, high: float, intervals: int) -> list[float]:
    """Choose round tick values, the first at or below `low` and the last at or above `high`.

    Args:
        low: smallest value.
        high: largest value.
        intervals: desired number of intervals; there are at most `intervals` + 2 ticks.

    Example:
        >>> ticks(0.13, 0.58, 5)
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    """
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # equal up to rounding
        pad = abs(low) / 2 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / intervals
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def tick_text(value: float, all_ticks: Sequence[float]) -> str:
    """Format a tick with as many decimals as the step of its axis needs; axes that reach 10,000 count in thousands."""
    step = all_ticks[1] - all_ticks[0]
    if abs(all_ticks[-1]) >= 10_000:
        if not value:
            return "0"
        return f"{value / 1000:,.{0 if step >= 1000 else 1}f}k".replace("-", "−")
    if max(map(abs, all_ticks)) < 1e-4:
        return f"{value:.3g}".replace("-", "−")
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    if round(step * 10**digits, 6) % 1:
        digits += 1  # a step of 0.25 needs two
    return f"{value:,.{digits}f}".replace("-", "−")


def is_finite(point: Point) -> bool:
    """Return True if both coordinates are finite; other points are not drawn."""
    return math.isfinite(point[0]) and math.isfinite(point[1])


def extent(chart: Chart) -> tuple[Point, Point] | None:
    """Compute (min x, max x), (min y, max y) of all finite points and bands; the chart's own limits override them.

    Returns:
        The limits, or None if the chart has no finite point.
    """
    finite = [point for point in _all_points(chart) if is_finite(point)]
    if not finite:
        return None
    xs, ys = [x for x, _ in finite], [y for _, y in finite]
    if any(series.mark == "bars" for series in chart.series):
        ys.append(0.0)  # bars start at zero: their length is the value
    return chart.x_limits or (min(xs), max(xs)), chart.y_limits or (min(ys), max(ys))


def _all_points(chart: Chart) -> Iterator[Point]:
    for series in chart.series:
        yield from series.points
        for x, low, high in series.band:
            yield from ((x, low), (x, high))
