"""Axes: round numbers at their ticks, the same in pages and in figures for papers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from repulsive.pages.panels import Chart, Point


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers, at most `most` + 2 of them, from at or below `low` to at or above `high`.

    Example:
        >>> ticks(0.13, 0.58, 5)
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    """
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # equal but for rounding, as a ratio that is held
        pad = abs(low) / 2 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def tick_text(value: float, among: Sequence[float]) -> str:
    """All ticks of an axis have the decimals that their step needs; from ten thousand on in thousands."""
    step = among[1] - among[0]
    if abs(among[-1]) >= 10_000:
        if not value:
            return "0"
        return f"{value / 1000:,.{0 if step >= 1000 else 1}f}k".replace("-", "−")
    if max(map(abs, among)) < 1e-4:
        return f"{value:.3g}".replace("-", "−")
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    if round(step * 10**digits, 6) % 1:
        digits += 1  # a step of 0.25 needs two
    return f"{value:,.{digits}f}".replace("-", "−")


def drawn(point: Point) -> bool:
    """Whether a point has a place."""
    return math.isfinite(point[0]) and math.isfinite(point[1])


def extent(chart: Chart) -> tuple[Point, Point] | None:
    """(least x, greatest x), (least y, greatest y) of all that is finite, limits included; None if nothing is."""
    finite = [point for point in _places(chart) if drawn(point)]
    if not finite:
        return None
    xs, ys = [x for x, _ in finite], [y for _, y in finite]
    if any(series.mark == "bars" for series in chart.series):
        ys.append(0.0)  # a bar that does not start at zero lies
    return chart.x_limits or (min(xs), max(xs)), chart.y_limits or (min(ys), max(ys))


def _places(chart: Chart) -> Iterator[Point]:
    for series in chart.series:
        yield from series.points
        for x, low, high in series.band:
            yield from ((x, low), (x, high))
