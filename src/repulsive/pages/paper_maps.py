"""Figures for papers that are maps: how alike heads are, and what each looks at (the paper's Figure 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from repulsive.pages.content import Content, Example
from repulsive.pages.layered import Maps
from repulsive.pages.panels import Grid
from repulsive.pages.text import shortened, visible

HEAT = ("#ffffff", "#d6e3f8", "#9fbeec", "#3f6bb8", "#122c66")
_BETWEEN = "#e6e9ef"  # colour between maps
_ACROSS = 6  # grids in a row
_WORD = 0.115  # inches: a column of a map
_MOST = 30.0  # inches: a figure is not wider or higher
_LONGEST = 14  # letters of a word


def attention_figures(content: Content) -> dict[str, Any]:
    """File's name -> figure: one for each example, or for each example and method of models with layers."""
    figures = {f"attention-{place}": _example(example) for place, example in enumerate(content.examples, 1)}
    for place, layered in enumerate(content.layered, 1):
        for number, (method, layers) in enumerate(layered.readings.items(), 1):
            figures[f"attention-{place}-{number}"] = _mosaic(layers, method)
    return figures


def grid_figure(grids: Sequence[Grid]) -> Any:
    """Grids of one kind side by side, in as many rows as they need, with one scale of colours."""
    rows, columns = math.ceil(len(grids) / _ACROSS), min(len(grids), _ACROSS)
    figure, places = new_figure(1.7 * columns + 0.5, 1.9 * rows, rows, columns)
    shown = None
    for place, grid in zip(places, grids, strict=False):
        shown = place.imshow(grid.values.numpy(), vmin=0, vmax=1, cmap=_heat())
        place.set_title(plain(grid.name), fontsize=8)
    for place in places:
        bare(place)
    for place in places[len(grids) :]:
        place.set_visible(False)
    figure.colorbar(shown, ax=places, shrink=0.8, label=plain(grids[0].what))
    return figure


def new_figure(wide: float, high: float, rows: int = 1, columns: int = 1) -> tuple[Any, list[Any]]:
    """A figure that pyplot knows nothing of: nothing global is changed, no window can open."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(min(wide, _MOST), min(high, _MOST)), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def plain(text: str) -> str:
    """Text that Matplotlib shows as it is: a dollar would start a formula."""
    return visible(text).replace("$", r"\$")


def bare(axes: Any) -> None:
    """No ticks."""
    axes.set_xticks([])
    axes.set_yticks([])


def _example(example: Example) -> Any:
    """Every method's heads over the words, and above them their mean."""
    words = [plain(shortened(token, _LONGEST)) for token in example.tokens]
    high = sum(0.1 * (len(reading.attention) + 2) + 0.9 for reading in example.readings) + 0.3
    figure, places = new_figure(_WORD * len(words) + 1.2, high, len(example.readings))
    top = max(float(reading.weights().max()) for reading in example.readings)
    shown = None
    for place, reading in zip(places, example.readings, strict=True):
        weights = reading.weights()  # [M, T]
        gap = torch.full_like(weights[:1], math.nan)
        rows = torch.cat([weights.mean(0, keepdim=True), gap, weights])  # [M + 2, T]
        shown = place.imshow(rows.numpy(), vmin=0, vmax=top, cmap=_heat(), aspect="auto", interpolation="nearest")
        place.set_facecolor(_BETWEEN)
        place.set_title(plain(f"{reading.method}: {reading.predicted} ({reading.probability:.2f})"), fontsize=8)
        place.set_xticks(range(len(words)), words, rotation=90, fontsize=5)
        heads = list(range(0, len(weights), 1 if len(weights) <= 12 else 5))
        place.set_yticks([0, *(head + 2 for head in heads)], ["mean", *(str(head + 1) for head in heads)], fontsize=5)
        place.tick_params(length=0)
    figure.colorbar(shown, ax=places, shrink=0.8, label="attention")
    return figure


def _mosaic(layers: Sequence[Maps], method: str) -> Any:
    """A tile for each head: layers down, heads across. Colours run up to the largest weight of all."""
    heads = max(len(maps.weights) for maps in layers)
    high, wide = (max(maps.weights.shape[axis] for maps in layers) for axis in (1, 2))
    tiles = torch.full((len(layers), heads, high + 1, wide + 1), math.nan)
    for place, maps in enumerate(layers):
        count, rows, columns = maps.weights.shape
        tiles[place, :count, :rows, :columns] = maps.weights.float()
    picture: Tensor = tiles.transpose(1, 2).flatten(2).flatten(0, 1)  # [L (T + 1), M (S + 1)]
    figure, (axes,) = new_figure(1.4 + 0.8 * heads, 0.6 + 0.8 * len(layers) * min(4.0, high / wide))
    shown = axes.imshow(picture.numpy(), vmin=0, cmap=_heat(), aspect="auto", interpolation="nearest")
    axes.set_facecolor(_BETWEEN)
    axes.set_title(plain(method), fontsize=8)
    axes.set_xticks([(head + 0.5) * (wide + 1) for head in range(heads)], [str(head) for head in range(heads)])
    axes.set_yticks([(place + 0.5) * (high + 1) for place in range(len(layers))], [plain(m.layer) for m in layers])
    axes.set_xlabel("head")
    axes.tick_params(length=0, labelsize=6)
    figure.colorbar(shown, ax=axes, shrink=0.8, label="attention")
    return figure


def _heat() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("heat", HEAT)
