"""Chart of one dot per seed: a column for each method, the dots of a seed joined, and intervals beside the dots."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

from repulsive.pages.axes import tick_text, ticks
from repulsive.pages.data.seeds import SeedChart
from repulsive.pages.html.svg_chart import style_of
from repulsive.pages.text import escaped, number

_WIDTH, _HEIGHT = 360, 230  # in SVG units
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 12, 30
_SPREAD = 5.0  # horizontal distance between two seeds
_BESIDE = 14.0  # distance of the interval from the last seed
_CAP = 4.0  # half the width of the ends of an interval


def seed_chart(chart: SeedChart, methods: Sequence[str]) -> str:
    """Render the chart as a figure.

    Args:
        chart: the data.
        methods: all methods of the page; a method's position determines its colour.
    """
    every = [value for values in chart.values.values() for value in values]
    every += [end for interval in chart.intervals.values() for end in interval]
    every += [0.0] if chart.zero else []
    y_ticks = ticks(min(every), max(every), 5)
    low, high = y_ticks[0], y_ticks[-1]
    column = (_WIDTH - _LEFT - _RIGHT) / len(chart.values)

    def y_of(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def x_of(index: int, seed: int) -> float:
        return _LEFT + (index + 0.5) * column + (seed - (len(chart.seeds) - 1) / 2) * _SPREAD - _BESIDE / 2

    parts = "".join(
        f'<path class="grid" d="M{_LEFT} {y_of(y):.1f}H{_WIDTH - _RIGHT}"/>'
        f'<text class="tick y" x="{_LEFT - 7}" y="{y_of(y) + 4:.1f}">{tick_text(y, y_ticks)}</text>'
        for y in y_ticks
    )
    if chart.zero:
        parts += f'<path class="diagonal" d="M{_LEFT} {y_of(0):.1f}H{_WIDTH - _RIGHT}"/>'
    if chart.joined:
        for (a, left), (b, right) in pairwise(enumerate(chart.values.values())):
            for seed, (start, end) in enumerate(zip(left, right, strict=True)):
                path = f"M{x_of(a, seed):.1f} {y_of(start):.1f}L{x_of(b, seed):.1f} {y_of(end):.1f}"
                parts += f'<path class="pair" d="{path}"/>'
    for index, (method, values) in enumerate(chart.values.items()):
        style, middle = style_of(method, methods), _LEFT + (index + 0.5) * column
        for place, (seed, value) in enumerate(zip(chart.seeds, values, strict=True)):
            title = f"<title>{escaped(method)}, seed {seed}: {number(value, chart.digits)}</title>"
            centre = f'cx="{x_of(index, place):.1f}" cy="{y_of(value):.1f}"'
            parts += f'<circle class="dot {style}" {centre} r="4">{title}</circle>'
        if method in chart.intervals:
            x, (low_end, high_end) = x_of(index, len(values) - 1) + _BESIDE, chart.intervals[method]
            parts += _interval(x, y_of(low_end), y_of(high_end), y_of(statistics.fmean(values)), style)
        parts += f'<text class="tick" x="{middle:.1f}" y="{_HEIGHT - 9}">{escaped(method)}</text>'
    name = escaped(chart.name)
    return (
        f'<figure class="chart"><figcaption>{name}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{name}. {escaped(_in_words(chart))}">{parts}</svg></figure>\n'
    )


def _interval(x: float, low: float, high: float, mean: float, style: str) -> str:
    """Draw an interval as a vertical bar with ends, and its mean as a dot."""
    ends = "".join(f"M{x - _CAP:.1f} {y:.1f}h{2 * _CAP:g}" for y in (low, high))
    return (
        f'<path class="whisker {style}" d="M{x:.1f} {low:.1f}V{high:.1f}{ends}"/>'
        f'<circle class="mean {style}" cx="{x:.1f}" cy="{mean:.1f}" r="3.2"/>'
    )


def _in_words(chart: SeedChart) -> str:
    """Describe the means, and their intervals, for screen readers."""
    sentences = []
    for method, values in chart.values.items():
        text = f"{method}: mean {number(statistics.fmean(values), chart.digits)}"
        if method in chart.intervals:
            low, high = (number(end, chart.digits) for end in chart.intervals[method])
            text += f", interval {low} to {high}"
        sentences.append(text)
    return "; ".join(sentences)
