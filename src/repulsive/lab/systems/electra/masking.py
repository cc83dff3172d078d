"""Which pieces of a block are to be guessed, drawn on the device, always the same number of places."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Masked:
    """Blocks with masks.

    Args:
        tokens: with masks in place, int64 [B, T].
        places: what is to be guessed, int64 [B, N]; 0 where `counts` is 0.
        counts: 1.0 for places that count, float32 [B, N]; short blocks have fewer.
        first: where `places` names a place for the first time, int64 [B, N].
        answers: what stood there, int64 [B, N].
    """

    tokens: Tensor
    places: Tensor
    counts: Tensor
    first: Tensor
    answers: Tensor


def most_places(length: int, share: float) -> int:
    """Columns for places of a block: as the official code has it, 19 for 128 pieces and 15 %."""
    return max(1, int((share + 0.005) * length))


def places_of(ends: Tensor, length: int, share: float) -> Tensor:
    """How many places of each block count, int64 [B].

    Args:
        ends: pieces of each block, marks included, int64 [B].
        length: of a block with its padding.
        share: of the pieces that are to be guessed.
    """
    return (ends * share).round().long().clamp(1, most_places(length, share))


def mask(
    tokens: Tensor,
    ends: Tensor,
    marks: dict[str, int],
    share: float = 0.15,
    kept: float = 0.15,
    draw: torch.Generator | None = None,
) -> Masked:
    """Draw places, each from all pieces that are no marks, so that some come twice; nothing waits for the device.

    Args:
        tokens: int64 [B, T].
        ends: pieces of each block, marks included, int64 [B].
        marks: numbers of "CLS", "SEP" and "MASK".
        share: of the pieces that are to be guessed.
        kept: share of these that stay as they are; the others become masks.
        draw: torch's own generator by default.
    """
    length = tokens.shape[1]
    columns = torch.arange(most_places(length, share), device=tokens.device)  # [N]
    counted = columns < places_of(ends, length, share).unsqueeze(1)  # [B, N]
    cls, sep, masking = (marks[name] for name in ("CLS", "SEP", "MASK"))
    usual = (tokens != cls) & (tokens != sep) & (tokens != masking)
    usual &= torch.arange(length, device=tokens.device) < ends.unsqueeze(1)  # [B, T]
    ranks = usual.cumsum(1)  # [B, T]
    uniform = torch.rand(2, *counted.shape, device=tokens.device, generator=draw)  # [2, B, N]
    wanted = (uniform[0] * ranks[:, -1:]).long().clamp_max(ranks[:, -1:] - 1) + 1  # [B, N], which of the usual pieces
    # Where ranks reach it: as `searchsorted` finds, but compilers can join it to what is around.
    places = (ranks.unsqueeze(1) < wanted.unsqueeze(2)).sum(2).clamp_max(length - 1)
    places = torch.where(counted, places, 0)
    same = places.unsqueeze(2) == places.unsqueeze(1)  # [B, N, N]
    first = torch.where(same, columns, len(columns)).amin(2)
    hidden = (same & (uniform[1] >= kept).unsqueeze(1)).any(2)  # once is enough
    answers = tokens.gather(1, places)
    changed = tokens.scatter(1, places, torch.where(hidden & counted, masking, answers))
    return Masked(changed, places, counted.float(), first, answers)
