"""Attention of all heads on the words of one example: one heat map per method, rows are heads, columns are words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from repulsive.pages.data.report import Example, Reading
from repulsive.pages.html.heat_map import aspect_class, cells, levels, scale
from repulsive.pages.text import escaped, shortened, visible

_TITLE_HEIGHT = 20  # height of the method's name
_BAR_HEIGHT = 7  # height of the evidence marks between words and cells
_NUMBERS_WIDTH = 34  # width of the column with head numbers
_MAX_LETTERS = 16  # maximum letters shown of a word


def head_maps(example: Example, aspects: Mapping[int, int]) -> str:
    """Render the heat maps of one example.

    Heads are sorted by their most attended word: similar heads form a vertical stripe, diverse heads a staircase.

    Args:
        example: the example.
        aspects: position of each evidence word -> number of its aspect, from 1.
    """
    labels = [shortened(visible(token), _MAX_LETTERS) for token in example.tokens]
    top = max(float(reading.weights().max()) for reading in example.readings)
    blocks = "".join(_block(reading, index, labels, top, aspects) for index, reading in enumerate(example.readings))
    return (
        f'<figure class="heads">{scale(f"{top:.3f}", "attention of one head")}{blocks}'
        "<figcaption>Each row is a head, with its number on the left. Each column is a word. Heads are sorted by the "
        "word they attend to most: heads that attend to the same word form a stripe, heads that attend to different "
        "words form a staircase.</figcaption></figure>\n"
    )


def _block(reading: Reading, index: int, labels: Sequence[str], top: float, aspects: Mapping[int, int]) -> str:
    """Render the map of one method. The head numbers are a drawing of their own, which stays visible on scrolling."""
    weights, count = reading.weights(), len(labels)
    order, row_size = head_order(weights), row_height(len(weights))
    column_size = min(16.0, max(10.0, 1080 / count))
    y = _TITLE_HEIGHT + 10 + 6.5 * max(len(label) for label in labels)
    words = "".join(_word(label, at * column_size, y, column_size, aspects.get(at)) for at, label in enumerate(labels))
    y += _BAR_HEIGHT
    x = _NUMBERS_WIDTH - 6
    numbers = "".join(
        f'<text class="number" x="{x}" y="{y + (row + 0.5) * row_size + 3:.1f}">{order[row]}</text>'
        for row in range(0, len(order), 1 if row_size >= 9 else 4)
    )
    grid = (
        f'<rect class="ground" x="0" y="{y:.1f}" width="{count * column_size:.1f}" height="{len(order) * row_size}"/>'
        f'<g class="cells" data-method="{index}" data-order="{",".join(str(head) for head in order)}" '
        f'transform="translate(.5 {y:.1f}) scale({column_size:.3f} {row_size})">'
        f'<rect class="touch" width="{count}" height="{len(order)}"/>{cells(levels(weights[order], top))}</g>'
    )
    name, width, height = escaped(reading.method), count * column_size + 1, y + len(order) * row_size + 16
    return (
        f'<div class="maps" data-run="{index + 1}" role="region" tabindex="0" aria-label="Heads of {name}">'
        f'<svg class="side" width="{_NUMBERS_WIDTH}" height="{height:.0f}" '
        f'viewBox="0 0 {_NUMBERS_WIDTH} {height:.0f}" '
        f'aria-hidden="true"><text class="method" x="0" y="15">{name}</text>{numbers}</svg>'
        f'<svg width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="{name}: attention of every head on every word. {peak_summary(reading)}">{words}{grid}</svg>'
        "</div>\n"
    )


def head_order(weights: Tensor) -> list[int]:
    """Sort heads [M, T] by the position they attend to most; heads without attention come last."""
    peaks = weights.argmax(-1).tolist()
    silent = (weights.sum(-1) <= 0).tolist()
    return sorted(range(len(weights)), key=lambda head: (silent[head], peaks[head], head))


def peak_summary(reading: Reading) -> str:
    """Count the different words on which heads have their peaks, as text."""
    weights = reading.weights()
    active = weights[weights.sum(-1) > 0]
    words = len(set(active.argmax(-1).tolist())) if len(active) else 0
    heads, peaks = "head" if len(weights) == 1 else "heads", "word" if words == 1 else "different words"
    return f"{len(weights)} {heads}, peaks on {words} {peaks}"


def row_height(heads: int) -> int:
    """Choose the height of a row in pixels: fewer heads get taller rows."""
    return 14 if heads <= 12 else 10 if heads <= 32 else 6


def _word(label: str, x: float, y: float, width: float, aspect: int | None) -> str:
    """Draw a vertical word above its column, underlined in the colour of its aspect."""
    kind = f"word {aspect_class(aspect)}" if aspect else "word"
    bar = f'<path class="{aspect_class(aspect)}" d="M{x + 1:.1f} {y + 4:.1f}h{width - 2:.1f}"/>' if aspect else ""
    at = f"translate({x + width / 2 + 3.5:.1f} {y:.1f}) rotate(-90)"
    return f'<text class="{kind}" transform="{at}">{escaped(label)}</text>{bar}'
