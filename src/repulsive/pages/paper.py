"""Charts and grids as SVG and PDF files for papers, drawn by Matplotlib: the same data as on the page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from repulsive.errors import ConfigError
from repulsive.pages.axes import drawn, extent, ticks
from repulsive.pages.content import Content
from repulsive.pages.panels import Chart, Series
from repulsive.pages.paper_maps import attention_figures, grid_figure, new_figure, plain

COLOURS = ("#4a505a", "#8f6400", "#0072b2", "#c45100", "#00825e", "#a8457f", "#7a4fc0", "#14181f")  # --m0 ... --m7
DASHES = ("-", (0, (4, 2)), "-", (0, (1, 1.5)), (0, (5, 2, 1, 2)), (0, (2.5, 2)), "-", (0, (1, 2)))
AGAIN = (0, (7, 2, 1, 2, 1, 2))  # of eight more methods in the same colours
ENDINGS = ("svg", "pdf")
_SETTINGS = {"pdf.fonttype": 42, "svg.hashsalt": "repulsive", "font.size": 8, "axes.linewidth": 0.6}
_SIZE = (3.3, 2.3)  # inches: a column
_INSIDE = 5  # names that have room among the curves
_BESIDE = 1.9  # inches, for more


def check_matplotlib() -> None:
    """Raise unless figures can be drawn.

    Raises:
        ConfigError: Matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("figures need matplotlib; install it with: pip install 'repulsive[report]'")


def write_figures(folder: Path, content: Content) -> list[Path]:
    """Every chart, every row of grids and every example's attention of a report, as SVG and as PDF.

    Args:
        folder: where to; it is made. Files of the same names are replaced.
        content: what the page shows.

    Returns:
        The files written.

    Raises:
        ConfigError: Matplotlib is not installed, or the folder cannot be written.
    """
    check_matplotlib()
    import matplotlib

    methods = content.methods()
    with matplotlib.rc_context(_SETTINGS):
        figures = {chart.file or _slug(chart.name): _chart(chart, methods) for chart in content.all_charts()}
        grids = [grid for panel in content.panels for grid in panel.grids]
        for what in dict.fromkeys(grid.what for grid in grids):
            figures[_slug(what)] = grid_figure([grid for grid in grids if grid.what == what])
        figures |= attention_figures(content)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return [_save(figure, folder / f"{name}.{end}") for name, figure in figures.items() for end in ENDINGS]
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be written ({error.strerror}); choose another --figures") from None


def _chart(chart: Chart, methods: Sequence[str]) -> Any:
    figure, (axes,) = new_figure(*_SIZE)
    for series in chart.series:
        again, place = divmod(methods.index(series.method), len(COLOURS))
        _series(axes, series, COLOURS[place], AGAIN if again % 2 else DASHES[place])
    if chart.diagonal:
        axes.plot([0, 1], [0, 1], color="#565e6c", linewidth=0.8, linestyle=(0, (3, 3)), zorder=0)
    if chart.x_log:
        axes.set_xscale("log", base=2)
    if chart.x_ticks:
        axes.set_xticks(chart.x_ticks, [f"{tick:g}" for tick in chart.x_ticks])
    ends = extent(chart)
    if ends is not None and chart.y_limits is not None:
        marks = ticks(*ends[1], 5)
        axes.set_ylim(marks[0], marks[-1])
    if chart.x_limits is not None:
        axes.set_xlim(*chart.x_limits)
    axes.set_xlabel(plain(chart.x_name))
    axes.set_ylabel(plain(chart.y_name or chart.name))
    axes.grid(axis="y", color="#d9dde5", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    named = len({series.method for series in chart.series})
    if named > _INSIDE:  # names beside the curves, which they would cover
        figure.legend(frameon=False, fontsize=7, loc="outside right upper")
        figure.set_figwidth(figure.get_figwidth() + _BESIDE)
    elif named > 1:
        axes.legend(frameon=False, fontsize=7)
    elif chart.y_name:
        axes.set_title(plain(chart.name), fontsize=8)
    return figure


def _series(axes: Any, series: Series, colour: str, dash: Any) -> None:
    points = [point for point in series.points if drawn(point)]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    name = None if series.mark == "fit" else plain(series.method)
    if series.band:
        edges = list(zip(*series.band, strict=True))
        axes.fill_between(*edges, color=colour, alpha=0.16, linewidth=0)
    if series.mark == "bars":
        wide = [right - left for left, right in pairwise(xs)]
        axes.bar(xs[:-1], ys[:-1], wide, align="edge", color=colour, edgecolor="white", linewidth=0.4, label=name)
    elif series.mark == "dots":
        given = series.sizes or [0.36] * len(series.points)
        sizes = [40 * size for point, size in zip(series.points, given, strict=True) if drawn(point)]
        axes.scatter(xs, ys, sizes, color=colour, alpha=0.75, linewidths=0, label=name)
    else:
        dot, thick = "o" if len(points) == 1 else None, 0.8 if series.mark == "fit" else 1.2
        axes.plot(xs, ys, color=colour, linestyle=dash, linewidth=thick, marker=dot, markersize=3, label=name)


def _save(figure: Any, path: Path) -> Path:
    stamp = "Date" if path.suffix == ".svg" else "CreationDate"
    figure.savefig(path, metadata={stamp: None})  # the same report gives the same bytes
    return path


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "figure"
