"""Heat maps as SVG: colour levels, cells, colour scale, and grids of pairwise similarity."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from repulsive.diagnostics.overlap import head_overlap
from repulsive.pages.data.report import Example
from repulsive.pages.text import escaped, number

LEVELS = 9  # CSS classes h1 to h9; h0 has no colour. Negative values: n1 to n9
_ASPECTS = 6  # CSS classes e1 to e6; further aspects reuse the colours


def levels(weights: Tensor, top: float) -> Tensor:
    r"""Compute the colour level of each weight, $\lfloor 9.5 \sqrt{a / top} \rfloor$.

    Level 0 is below 1.1 % of the top, level 9 from 90 % on. The square root keeps small weights visible beside a peak.
    `example_explorer.js` and `attention_map.js` use the same formula.

    Args:
        weights: weights, not negative, of any shape.
        top: the weight with the full colour; if 0, every level is 0.
    """
    if top <= 0:
        return torch.zeros(weights.shape, dtype=torch.long)
    return ((LEVELS + 0.5) * (weights / top).clamp(0, 1).sqrt()).floor().long()


def signed_levels(values: Tensor) -> Tensor:
    """Compute the colour level of each similarity, from -9 for -1 to 9 for 1; level 0 is in the middle."""
    return (LEVELS * values.clamp(-1, 1)).round().long()


def aspect_class(aspect: int) -> str:
    """Return the CSS class for the colour of an aspect; aspects are counted from 1."""
    return f"e{(aspect - 1) % _ASPECTS + 1}"


def mean_overlap(examples: Sequence[Example], method: int) -> Tensor:
    """Average the `head_overlap` of one method over examples.

    Args:
        examples: the examples.
        method: index of the method's reading in each example.

    Returns:
        [M, M].
    """
    return torch.stack([head_overlap(example.readings[method].weights()) for example in examples]).mean(0)


def cells(steps: Tensor) -> str:
    """Draw a grid of colour levels [rows, columns], from -9 to 9, with one path per level; a cell is one unit.

    A cell is a thick dash (`M column row h.9`), which takes half the bytes of a rectangle.
    """
    paths = ""
    for step in range(-LEVELS, LEVELS + 1):
        if step == 0:
            continue
        positions = (steps == step).nonzero().tolist()
        if positions:
            dashes = "".join(f"M{column} {row}.5h.9" for row, column in positions)
            paths += f'<path class="{_level_class(step)}" d="{dashes}"/>'
    return paths


def overlap_grid(matrix: Tensor, method: str, measure: str = "Overlap", *, short: bool = False) -> str:
    """Draw a square grid of the similarity of heads, with the mean over pairs below it.

    Args:
        matrix: similarity [M, M], from -1 to 1; colours diverge at 0.
        method: caption: name of the method or of the layer.
        measure: name of the similarity measure.
        short: show the mean only, without the range.
    """
    count = len(matrix)
    name = escaped(method)
    if count == 1:
        return f'<figure class="overlap"><figcaption><b>{name}</b> one head: no pairs</figcaption></figure>\n'
    pairs = matrix[tuple(torch.triu_indices(count, count, 1))]  # [M (M - 1) / 2]
    drawn = cells(signed_levels(matrix))
    summary = f"mean over pairs {_two(pairs.mean())}, from {_two(pairs.min())} to {_two(pairs.max())}"
    return (
        f'<figure class="overlap"><svg viewBox="-.1 0 {count + 0.1:.1f} {count}" role="img" '
        f'aria-label="{escaped(measure)} of {count} heads of {name}: {summary}"><g class="cells">{drawn}</g>'
        f"</svg><figcaption><b>{name}</b> {f'mean {_two(pairs.mean())}' if short else summary}</figcaption></figure>\n"
    )


def _two(value: Tensor) -> str:
    return number(float(value), 2)


def scale(top: str, quantity: str, top_id: str = "") -> str:
    """Draw the colour scale from 0 to `top`.

    Args:
        top: value with the full colour.
        quantity: text after the scale.
        top_id: HTML id of the top value, for scripts that change it.
    """
    identified = f' id="{top_id}"' if top_id else ""
    end = f"<span{identified}>{escaped(top)}</span> {escaped(quantity)}"
    return f'<p class="scale"><span>0</span>{_swatches(range(LEVELS + 1))}{end}</p>\n'


def signed_scale() -> str:
    """Draw the colour scale from -1 to 1, with 0 in the middle."""
    negative, positive = _swatches(range(-LEVELS, 0)), _swatches(range(1, LEVELS + 1))
    middle = '<i class="h0"></i><span class="zero">0</span><i class="h0"></i>'
    return f'<p class="scale signed"><span>−1</span>{negative}{middle}{positive}<span>1</span></p>\n'


def _swatches(steps: Iterable[int]) -> str:
    return "".join(f'<i class="{_level_class(step)}"></i>' for step in steps)


def _level_class(step: int) -> str:
    return f"n{-step}" if step < 0 else f"h{step}"
