"""Figure of the attention maps of one layer, drawn with Matplotlib."""

from __future__ import annotations

from typing import Any

from torch import Tensor

_COLUMNS = 6


def attention_figure(maps: Tensor, title: str) -> Any:
    """Draw the attention map of every head side by side; the colour scale is shared by all heads.

    Args:
        maps: attention weights [M, T, S].
        title: title of the figure.

    Returns:
        A `matplotlib.figure.Figure`.
    """
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, len(maps))
    rows = -(-len(maps) // columns)
    figure = Figure(figsize=(1.8 * columns, 1.9 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    top = float(maps.max())
    for head, axis in enumerate(axes):
        if head < len(maps):
            axis.imshow(maps[head].float().cpu().numpy(), vmin=0, vmax=top, cmap="Blues", aspect="auto")
            axis.set_title(f"head {head}", fontsize=8)
            axis.tick_params(labelsize=6)
        else:
            axis.axis("off")
    figure.suptitle(title, fontsize=9)
    return figure
