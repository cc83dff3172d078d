"""Turn sentence pairs into tensors: padded to one length, or packed end to end."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from repulsive.lab.layers.packed import Packed
from repulsive.lab.text.pieces import BOS
from repulsive.lab.text.prepared import Part
from repulsive.lab.text.tokens import PAD


def padded_pairs(part: Part, indices: Tensor, length: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return source, target shifted right, and target of some pairs, int64 [B, length] each.

    Without a length, all are as long as the longest sentence.
    """
    source, target = (side.padded(indices, length)[0].long() for side in part.sentences)
    return source, F.pad(target[:, :-1], (1, 0), value=BOS), target


def packed_pairs(
    part: Part, indices: Tensor, count: Tensor, rows: int, longest: int
) -> tuple[Tensor, Tensor, Tensor, tuple[Packed, Packed]]:
    """Pack source, shifted target and target of the first `count` pairs, int64 [rows] each; also return positions."""
    flat, sides = [], []
    there = torch.arange(len(indices), device=indices.device) < count  # [B]
    for side in part.sentences:
        starts = side.offsets[indices]  # [B]
        lengths = torch.where(there, side.offsets[indices + 1] - starts, 0)  # [B]
        where = Packed.of(lengths, rows, longest)
        real = where.sentences < len(indices)  # [rows]
        places = F.pad(starts, (0, 1))[where.sentences] + where.places
        flat.append(torch.where(real, side.values[places].long(), PAD))
        sides.append(where)
    source, target = flat
    before = torch.where(sides[1].places == 0, BOS, target.roll(1))  # rows after the last pair are ignored
    return source, before, target, (sides[0], sides[1])
