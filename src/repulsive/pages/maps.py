"""Attention as colour: levels, grids of cells, and how alike heads are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from repulsive.pages.content import Example
from repulsive.pages.text import escaped, number

LEVELS = 9  # steps of colour above none: the classes h1 to h9 of the style sheet
_ASPECTS = 6  # colours of aspects: the classes e1 to e6; more aspects start over, their numbers do not


def levels(weights: Tensor, top: float) -> Tensor:
    r"""Colour step of each weight, $\lfloor 9.5 \sqrt{a / top} \rfloor$: 0 below 1.1 % of the top, 9 from 90 % on.

    The root keeps small weights visible beside a peak. The same formula is in `page.js` for single heads.

    Args:
        weights: not negative, of any shape.
        top: the weight with the full colour; 0 makes every step 0.
    """
    if top <= 0:
        return torch.zeros(weights.shape, dtype=torch.long)
    return ((LEVELS + 0.5) * (weights / top).clamp(0, 1).sqrt()).floor().long()


def aspect_class(aspect: int) -> str:
    """The class that gives words and bars the colour of an aspect, counted from 1."""
    return f"e{(aspect - 1) % _ASPECTS + 1}"


def head_overlap(weights: Tensor) -> Tensor:
    r"""$\sum_t \min(a_{it}, a_{jt})$ of each pair of heads, [..., M, T] -> [..., M, M]: 1 same words, 0 none."""
    rows = weights.unbind(-2)  # one head at a time: [..., M, M, T] would be large
    return torch.stack([torch.minimum(row.unsqueeze(-2), weights).sum(-1) for row in rows], -2)


def mean_overlap(examples: Sequence[Example], place: int) -> Tensor:
    """`head_overlap` of the reading at `place`, averaged over examples: [M, M]."""
    return torch.stack([head_overlap(example.readings[place].weights()) for example in examples]).mean(0)


def cells(steps: Tensor) -> str:
    """Paths that draw a grid of colour steps [rows, columns] in units of a cell, one path per colour.

    A cell is a thick dash (`M column row h.9`): half the bytes of a rectangle.
    """
    paths = ""
    for step in range(1, LEVELS + 1):
        found = (steps == step).nonzero().tolist()
        if found:
            dashes = "".join(f"M{column} {row}.5h.9" for row, column in found)
            paths += f'<path class="h{step}" d="{dashes}"/>'
    return paths


def overlap_grid(matrix: Tensor, method: str, what: str = "Overlap", *, short: bool = False) -> str:
    """A small square grid of how alike the heads of a method, or of a layer, are, with the mean over pairs in words.

    Args:
        matrix: [M, M].
        method: name of the grid.
        what: the numbers are.
        short: fewer words below it.
    """
    count = len(matrix)
    name = escaped(method)
    if count == 1:
        return f'<figure class="overlap"><figcaption><b>{name}</b> one head: no pairs</figcaption></figure>\n'
    pairs = matrix[tuple(torch.triu_indices(count, count, 1))]  # [M (M - 1) / 2]
    steps = (LEVELS * matrix.clamp(0, 1)).round().long()
    said = f"mean over pairs {_two(pairs.mean())}, from {_two(pairs.min())} to {_two(pairs.max())}"
    return (
        f'<figure class="overlap"><svg viewBox="-.1 0 {count + 0.1:.1f} {count}" role="img" '
        f'aria-label="{escaped(what)} of {count} heads of {name}: {said}"><g class="cells">{cells(steps)}</g></svg>'
        f"<figcaption><b>{name}</b> {f'mean {_two(pairs.mean())}' if short else said}</figcaption></figure>\n"
    )


def _two(value: Tensor) -> str:
    return number(float(value), 2)


def scale(top: str, of: str, name: str = "") -> str:
    """The colours from none to full, with the weights they stand for; a script finds the last by its `name`."""
    swatches = "".join(f'<i class="h{step}"></i>' for step in range(LEVELS + 1))
    named = f' id="{name}"' if name else ""
    return f'<p class="scale"><span>0</span>{swatches}<span{named}>{escaped(top)}</span> {escaped(of)}</p>\n'
