"""All heads over the words of one example: a grid for each method, rows are heads, columns are words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from repulsive.pages.content import Example, Reading
from repulsive.pages.maps import aspect_class, cells, levels, scale
from repulsive.pages.text import escaped, shortened, visible

_TITLE = 20  # height of a method's name
_BAR = 7  # height of the marks of evidence between words and cells
_SIDE = 34  # width of the heads' numbers
_LONGEST = 16  # characters of an upright word


def head_maps(example: Example, aspects: Mapping[int, int]) -> str:
    """The grids of one example.

    Heads of a method are ordered by the word they look at most, so that collapsed heads are a stripe and diverse heads
    a stair.

    Args:
        example: what to draw.
        aspects: for each position that is evidence the number of its aspect, from 1.
    """
    labels = [shortened(visible(token), _LONGEST) for token in example.tokens]
    top = max(float(reading.weights().max()) for reading in example.readings)
    blocks = "".join(_block(reading, place, labels, top, aspects) for place, reading in enumerate(example.readings))
    return (
        f'<figure class="heads">{scale(f"{top:.3f}", "attention of a head")}{blocks}'
        "<figcaption>A row is a head (its number at the left), a column a word. Heads are ordered by the word they "
        "look at most: heads that read the same form a stripe, heads that share the text a stair.</figcaption>"
        "</figure>\n"
    )


def _block(reading: Reading, place: int, labels: Sequence[str], top: float, aspects: Mapping[int, int]) -> str:
    """The heads of one method: their numbers, which stay in sight, and the cells below the words."""
    weights, count = reading.weights(), len(labels)
    order, high = head_order(weights), row_height(len(weights))
    wide = min(16.0, max(10.0, 1080 / count))  # of a word
    y = _TITLE + 10 + 6.5 * max(len(label) for label in labels)
    words = "".join(_word(label, at * wide, y, wide, aspects.get(at)) for at, label in enumerate(labels))
    y += _BAR
    numbers = "".join(
        f'<text class="number" x="{_SIDE - 6}" y="{y + (row + 0.5) * high + 3:.1f}">{order[row] + 1}</text>'
        for row in range(0, len(order), 1 if high >= 9 else 4)
    )
    grid = (
        f'<rect class="ground" x="0" y="{y:.1f}" width="{count * wide:.1f}" height="{len(order) * high}"/>'
        f'<g class="cells" data-method="{place}" data-order="{",".join(str(head) for head in order)}" '
        f'transform="translate(.5 {y:.1f}) scale({wide:.3f} {high})">'
        f'<rect class="touch" width="{count}" height="{len(order)}"/>{cells(levels(weights[order], top))}</g>'
    )
    name, width, height = escaped(reading.method), count * wide + 1, y + len(order) * high + 16
    return (
        f'<div class="maps" data-run="{place + 1}" role="region" tabindex="0" aria-label="Heads of {name}">'
        f'<svg class="side" width="{_SIDE}" height="{height:.0f}" viewBox="0 0 {_SIDE} {height:.0f}" '
        f'aria-hidden="true"><text class="method" x="0" y="15">{name}</text>{numbers}</svg>'
        f'<svg width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="{name}: attention of every head on every word. {top_words(reading)}">{words}{grid}</svg></div>\n'
    )


def head_order(weights: Tensor) -> list[int]:
    """Heads by the position they look at most, heads without any attention last."""
    peaks = weights.argmax(-1).tolist()
    silent = (weights.sum(-1) <= 0).tolist()
    return sorted(range(len(weights)), key=lambda head: (silent[head], peaks[head], head))


def top_words(reading: Reading) -> str:
    """On how many different words the heads have their peaks, in words."""
    weights = reading.weights()
    looking = weights[weights.sum(-1) > 0]
    words = len(set(looking.argmax(-1).tolist())) if len(looking) else 0
    heads, peaks = "head" if len(weights) == 1 else "heads", "word" if words == 1 else "different words"
    return f"{len(weights)} {heads}, peaks on {words} {peaks}"


def row_height(heads: int) -> int:
    """Fewer heads get higher rows."""
    return 14 if heads <= 12 else 10 if heads <= 32 else 6


def _word(label: str, x: float, y: float, wide: float, aspect: int | None) -> str:
    """An upright word that ends above its column, with the bar of its aspect below it."""
    kind = f"word {aspect_class(aspect)}" if aspect else "word"
    bar = f'<path class="{aspect_class(aspect)}" d="M{x + 1:.1f} {y + 4:.1f}h{wide - 2:.1f}"/>' if aspect else ""
    at = f"translate({x + wide / 2 + 3.5:.1f} {y:.1f}) rotate(-90)"
    return f'<text class="{kind}" transform="{at}">{escaped(label)}</text>{bar}'
