"""Matplotlib basics that charts and maps share: an empty figure, plain text, axes without ticks."""

from __future__ import annotations

from typing import Any

from repulsive.pages.text import visible

_MAX_SIZE = 30.0  # inches


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, list[Any]]:
    """Create a figure without pyplot: no global state changes and no window opens.

    Args:
        width: width in inches, limited to 30.
        height: height in inches, limited to 30.
        rows: number of rows of axes.
        columns: number of columns of axes.

    Returns:
        The figure and its axes, row by row.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(min(width, _MAX_SIZE), min(height, _MAX_SIZE)), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def plain(text: str) -> str:
    """Escape dollar signs, which Matplotlib would read as the start of a formula."""
    return visible(text).replace("$", r"\$")


def hide_ticks(axes: Any) -> None:
    """Remove all ticks of both axes."""
    axes.set_xticks([])
    axes.set_yticks([])
