"""Heat maps as Matplotlib figures: similarity of heads, and the attention of each head (the paper's Figure 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from repulsive.pages.data.layers import Maps
from repulsive.pages.data.panels import Grid
from repulsive.pages.data.report import Content, Example
from repulsive.pages.figures.canvas import hide_ticks, new_figure, plain
from repulsive.pages.text import shortened

HEAT = ("#ffffff", "#d6e3f8", "#9fbeec", "#3f6bb8", "#122c66")
SIGNED_HEAT = ("#5f2600", "#b45a14", "#f1b68c", "#fbe2cf", *HEAT)  # from -1 to 1, 0 is white
_GAP_COLOUR = "#e6e9ef"  # between maps
_GRIDS_PER_ROW = 6
_COLUMN_WIDTH = 0.115  # inches: one word of a map
_MAX_LETTERS = 14  # maximum letters shown of a word


def attention_figures(content: Content) -> dict[str, Any]:
    """Draw the attention of all examples.

    Returns:
        File name -> figure: one figure per example, or one per example and method for models with layers.
    """
    figures = {f"attention-{index}": _example_figure(example) for index, example in enumerate(content.examples, 1)}
    for index, layered in enumerate(content.layered, 1):
        for number, (method, layers) in enumerate(layered.readings.items(), 1):
            figures[f"attention-{index}-{number}"] = _layers_figure(layers, method)
    return figures


def grid_figure(grids: Sequence[Grid]) -> Any:
    """Draw grids of the same quantity side by side with a common colour scale, six in a row."""
    rows, columns = math.ceil(len(grids) / _GRIDS_PER_ROW), min(len(grids), _GRIDS_PER_ROW)
    figure, all_axes = new_figure(1.7 * columns + 0.5, 1.9 * rows, rows, columns)
    image = None
    is_signed = any(float(grid.values.min()) < 0 for grid in grids)
    lowest, colours = (-1, _heat(SIGNED_HEAT)) if is_signed else (0, _heat())
    for axes, grid in zip(all_axes, grids, strict=False):
        image = axes.imshow(grid.values.numpy(), vmin=lowest, vmax=1, cmap=colours)
        axes.set_title(plain(grid.name), fontsize=8)
    for axes in all_axes:
        hide_ticks(axes)
    for axes in all_axes[len(grids) :]:
        axes.set_visible(False)
    figure.colorbar(image, ax=all_axes, shrink=0.8, label=plain(grids[0].what))
    return figure


def _example_figure(example: Example) -> Any:
    """Draw one map per method: a row for each head, and above them the mean over heads."""
    words = [plain(shortened(token, _MAX_LETTERS)) for token in example.tokens]
    height = sum(0.1 * (len(reading.attention) + 2) + 0.9 for reading in example.readings) + 0.3
    figure, all_axes = new_figure(_COLUMN_WIDTH * len(words) + 1.2, height, len(example.readings))
    top = max(float(reading.weights().max()) for reading in example.readings)
    image = None
    for axes, reading in zip(all_axes, example.readings, strict=True):
        weights = reading.weights()  # [M, T]
        gap = torch.full_like(weights[:1], math.nan)
        rows = torch.cat([weights.mean(0, keepdim=True), gap, weights])  # [M + 2, T]
        image = axes.imshow(rows.numpy(), vmin=0, vmax=top, cmap=_heat(), aspect="auto", interpolation="nearest")
        axes.set_facecolor(_GAP_COLOUR)
        axes.set_title(plain(f"{reading.method}: {reading.predicted} ({reading.probability:.2f})"), fontsize=8)
        axes.set_xticks(range(len(words)), words, rotation=90, fontsize=5)
        heads = list(range(0, len(weights), 1 if len(weights) <= 12 else 5))
        axes.set_yticks([0, *(head + 2 for head in heads)], ["mean", *(str(head + 1) for head in heads)], fontsize=5)
        axes.tick_params(length=0)
    figure.colorbar(image, ax=all_axes, shrink=0.8, label="attention")
    return figure


def _layers_figure(layers: Sequence[Maps], method: str) -> Any:
    """Draw one tile per head, layers down and heads across, with one colour scale up to the largest weight."""
    heads = max(len(maps.weights) for maps in layers)
    height, width = (max(maps.weights.shape[axis] for maps in layers) for axis in (1, 2))
    tiles = torch.full((len(layers), heads, height + 1, width + 1), math.nan)
    for index, maps in enumerate(layers):
        count, rows, columns = maps.weights.shape
        tiles[index, :count, :rows, :columns] = maps.weights.float()
    picture: Tensor = tiles.transpose(1, 2).flatten(2).flatten(0, 1)  # [L (T + 1), M (S + 1)]
    figure, (axes,) = new_figure(1.4 + 0.8 * heads, 0.6 + 0.8 * len(layers) * min(4.0, height / width))
    image = axes.imshow(picture.numpy(), vmin=0, cmap=_heat(), aspect="auto", interpolation="nearest")
    axes.set_facecolor(_GAP_COLOUR)
    axes.set_title(plain(method), fontsize=8)
    axes.set_xticks([(head + 0.5) * (width + 1) for head in range(heads)], [str(head) for head in range(heads)])
    axes.set_yticks([(row + 0.5) * (height + 1) for row in range(len(layers))], [plain(m.layer) for m in layers])
    axes.set_xlabel("head")
    axes.tick_params(length=0, labelsize=6)
    figure.colorbar(image, ax=axes, shrink=0.8, label="attention")
    return figure


def _heat(colours: Sequence[str] = HEAT) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("heat", list(colours))
