r"""Attention of a vision transformer on pictures, as bytes for the page.

A byte from 1 to 255 stores $\log_2(S A_{ts})$ of the attention $A_{ts}$ of a query t over S keys, from -8 to
$\log_2 S$ in equal steps, so that the page can show any weight with a relative error below 4 %. 0 is smaller still.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from repulsive.diagnostics.inspection import Inspection
from repulsive.diagnostics.patches import PatchLayout
from repulsive.diagnostics.rollout import attention_rollout

LOWEST = -8.0  # logarithm of the smallest ratio to uniform attention that is stored


@dataclass(frozen=True, eq=False)
class Pictures:
    """The pictures of a page.

    Args:
        layout: positions of patches and special tokens.
        names: file names, in the order of `Inspection.maps`.
        jpegs: the pictures as JPEG files.
    """

    layout: PatchLayout
    names: Sequence[str]
    jpegs: Sequence[bytes]


@dataclass(frozen=True, eq=False)
class PictureMaps:
    """One picture and the attention of all heads on it.

    Args:
        name: file name.
        jpeg: the picture.
        layers: attention [M, T, T] of each layer of the atlas; None for a layer of another shape.
        rollout: attention rollout [T, T].
    """

    name: str
    jpeg: bytes
    layers: Sequence[Tensor | None]
    rollout: Tensor


def picture_maps(inspection: Inspection, pictures: Pictures) -> list[PictureMaps]:
    """Combine the maps of an inspection with their pictures; pictures without maps are left out.

    Args:
        inspection: result of `inspect_heads` on the pictures.
        pictures: the pictures.
    """
    result, shape = [], (pictures.layout.tokens,) * 2
    for maps, name, jpeg in zip(inspection.maps, pictures.names, pictures.jpegs, strict=False):
        layers = [maps.get(layer) for layer, *_ in inspection.layers]
        square = [x if x is not None and x.shape[1:] == shape else None for x in layers]
        present = [weights for weights in square if weights is not None]
        if present:
            result.append(PictureMaps(name, jpeg, square, attention_rollout(present)))
    return result


def query_rows(weights: Tensor, layout: PatchLayout, block: int) -> Tensor:
    """Select the queries that the page offers: mean over patches, special tokens, and square blocks of patches.

    Args:
        weights: attention [..., T, S].
        layout: positions of patches and special tokens.
        block: side of a block of query patches, which are averaged; 0 for no blocks.

    Returns:
        [..., Q, S].
    """
    special = len(layout.special)
    rows = [weights[..., special:, :].mean(-2, keepdim=True), weights[..., :special, :]]
    if block:
        patches = weights[..., special:, :].unflatten(-2, (layout.rows, layout.columns))  # [..., rows, columns, S]
        for down in range(0, layout.rows, block):
            for across in range(0, layout.columns, block):
                part = patches[..., down : down + block, across : across + block, :]
                rows.append(part.mean((-3, -2)).unsqueeze(-2))
    return torch.cat(rows, -2)


def log_bytes(weights: Tensor) -> Tensor:
    """Encode attention weights [..., S] as bytes, as described at the top of this file.

    Example:
        >>> log_bytes(torch.tensor([1.0, 0.0, 0.0, 0.0])).tolist()
        [255, 0, 0, 0]
    """
    keys = weights.shape[-1]
    highest = math.log2(max(2, keys))
    steps = ((weights.double() * keys).log2() - LOWEST) / (highest - LOWEST)  # 0 to 1
    return (1 + (254 * steps.clamp(0, 1)).round()).where(steps >= 0, 0.0).to(torch.uint8)


def from_bytes(stored: Tensor) -> Tensor:
    """Decode the result of `log_bytes`, as the page does."""
    keys = stored.shape[-1]
    highest = math.log2(max(2, keys))
    exponent = LOWEST + (stored.double() - 1) / 254 * (highest - LOWEST)
    return (torch.exp2(exponent) / keys).where(stored > 0, 0.0)
