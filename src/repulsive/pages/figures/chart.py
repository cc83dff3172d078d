"""One chart as a Matplotlib figure, in the colours and dashes of the page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from textwrap import fill
from typing import Any

from repulsive.pages.axes import extent, is_finite, ticks
from repulsive.pages.data.panels import Chart, Series
from repulsive.pages.figures.canvas import new_figure, plain

COLOURS = ("#4a505a", "#8f6400", "#0072b2", "#c45100", "#00825e", "#a8457f", "#7a4fc0", "#14181f")  # --m0 ... --m7
DASHES = ("-", (0, (4, 2)), "-", (0, (1, 1.5)), (0, (5, 2, 1, 2)), (0, (2.5, 2)), "-", (0, (1, 2)))
SECOND_DASH = (0, (7, 2, 1, 2, 1, 2))  # methods 9 to 16 reuse the eight colours with this dash
_SIZE = (3.3, 2.3)  # inches: one column of a paper
_MAX_INSIDE = 5  # a longer legend would cover the curves and is placed beside them
_LEGEND_WIDTH = 1.9  # inches, for a legend beside the curves
_MAX_LABEL = 30  # characters that fit beside the y axis


def chart_figure(chart: Chart, methods: Sequence[str]) -> Any:
    """Draw a chart.

    Args:
        chart: the data.
        methods: all methods of the report; a method's position determines its colour and dash.

    Returns:
        A Matplotlib figure.
    """
    figure, (axes,) = new_figure(*_SIZE)
    for series in chart.series:
        cycle, index = divmod(methods.index(series.method), len(COLOURS))
        _draw_series(axes, series, COLOURS[index], SECOND_DASH if cycle % 2 else DASHES[index])
    if chart.diagonal:
        axes.plot([0, 1], [0, 1], color="#565e6c", linewidth=0.8, linestyle=(0, (3, 3)), zorder=0)
    if chart.x_log:
        axes.set_xscale("log", base=2)
    if chart.x_ticks:
        axes.set_xticks(chart.x_ticks, [f"{tick:g}" for tick in chart.x_ticks])
    limits = extent(chart)
    if limits is not None and chart.y_limits is not None:
        y_ticks = ticks(*limits[1], 5)
        axes.set_ylim(y_ticks[0], y_ticks[-1])
    if chart.x_limits is not None:
        axes.set_xlim(*chart.x_limits)
    axes.set_xlabel(plain(chart.x_name))
    axes.set_ylabel(fill(plain(chart.y_name or chart.name), _MAX_LABEL))
    axes.grid(axis="y", color="#d9dde5", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    _add_legend(figure, axes, chart)
    return figure


def _add_legend(figure: Any, axes: Any, chart: Chart) -> None:
    """Add a legend for several methods; for one method a title, unless the name of the chart is on its y axis."""
    count = len({series.method for series in chart.series})
    has_dots = any(series.mark == "dots" for series in chart.series)  # Matplotlib places a legend over dots
    if count > _MAX_INSIDE or (count > 1 and has_dots):
        figure.legend(frameon=False, fontsize=7, loc="outside right upper")
        figure.set_figwidth(figure.get_figwidth() + _LEGEND_WIDTH)
    elif count > 1:
        axes.legend(frameon=False, fontsize=7)
    elif chart.y_name:
        axes.set_title(plain(chart.name), fontsize=8)


def _draw_series(axes: Any, series: Series, colour: str, dash: Any) -> None:
    points = [point for point in series.points if is_finite(point)]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    label = None if series.mark == "fit" else plain(series.method)
    if series.band:
        edges = list(zip(*series.band, strict=True))
        axes.fill_between(*edges, color=colour, alpha=0.16, linewidth=0)
    if series.mark == "bars":
        widths = [right - left for left, right in pairwise(xs)]
        axes.bar(xs[:-1], ys[:-1], widths, align="edge", color=colour, edgecolor="white", linewidth=0.4, label=label)
    elif series.mark == "dots":
        shares = series.sizes or [0.36] * len(series.points)
        sizes = [40 * share for point, share in zip(series.points, shares, strict=True) if is_finite(point)]
        axes.scatter(xs, ys, sizes, color=colour, alpha=0.75, linewidths=0, label=label)
    else:
        marker, width = "o" if len(points) == 1 else None, 0.8 if series.mark == "fit" else 1.2
        axes.plot(xs, ys, color=colour, linestyle=dash, linewidth=width, marker=marker, markersize=3, label=label)
