"""Write every chart and map of a report as SVG and PDF files."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from repulsive.errors import ConfigError
from repulsive.extras import install_command
from repulsive.pages.data.report import Content
from repulsive.pages.figures.chart import chart_figure
from repulsive.pages.figures.maps import attention_figures, grid_figure

SUFFIXES = ("svg", "pdf")
_SETTINGS = {"pdf.fonttype": 42, "svg.hashsalt": "repulsive", "font.size": 8, "axes.linewidth": 0.6}


def check_matplotlib() -> None:
    """Check that Matplotlib is installed.

    Raises:
        ConfigError: Matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError(f"figures need matplotlib; install it with: {install_command('report')}")


def write_figures(folder: Path, content: Content) -> list[Path]:
    """Write each chart, each row of grids and the attention of each example as SVG and PDF.

    Args:
        folder: output folder; created if missing. Files with the same names are replaced.
        content: the content of the report.

    Returns:
        The files written.

    Raises:
        ConfigError: Matplotlib is not installed, or the folder cannot be written.
    """
    check_matplotlib()
    import matplotlib

    methods = content.methods()
    with matplotlib.rc_context(_SETTINGS):
        figures = {chart.file or _slug(chart.name): chart_figure(chart, methods) for chart in content.all_charts()}
        grids = [grid for panel in content.panels for grid in panel.grids]
        for quantity in dict.fromkeys(grid.what for grid in grids):
            figures[_slug(quantity)] = grid_figure([grid for grid in grids if grid.what == quantity])
        figures |= attention_figures(content)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return [_save(figure, folder / f"{name}.{end}") for name, figure in figures.items() for end in SUFFIXES]
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be written ({error.strerror}); choose another --figures") from None


def _save(figure: Any, path: Path) -> Path:
    date_key = "Date" if path.suffix == ".svg" else "CreationDate"
    figure.savefig(path, metadata={date_key: None})  # without a date the same report gives the same bytes
    return path


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "figure"
