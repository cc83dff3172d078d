"""Draw the positions to mask on the device, with the same number of columns for every block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Masked:
    """Masked blocks, and the positions to predict in them.

    Args:
        tokens: token ids with masks, int64 [B, T].
        places: positions to predict, int64 [B, N]; 0 where `counts` is 0.
        counts: 1.0 for positions that count, 0.0 for padding, float32 [B, N]; short blocks have fewer positions.
        first: column in which `places` has the same position for the first time, int64 [B, N].
        answers: original token ids, int64 [B, N].
    """

    tokens: Tensor
    places: Tensor
    counts: Tensor
    first: Tensor
    answers: Tensor


def most_places(length: int, share: float) -> int:
    """Return the maximum number of positions to predict per block, as in the official code: 19 for 128 pieces, 15 %."""
    return max(1, int((share + 0.005) * length))


def places_of(ends: Tensor, length: int, share: float) -> Tensor:
    """Compute the number of positions to predict in each block, int64 [B].

    Args:
        ends: length of each block without padding, int64 [B].
        length: length of a block with its padding.
        share: share of the word pieces that are predicted.
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
    """Draw positions to predict, with replacement, from all pieces but special tokens. Does not synchronise with a GPU.

    Args:
        tokens: token ids, int64 [B, T].
        ends: length of each block without padding, int64 [B].
        marks: ids of "CLS", "SEP" and "MASK".
        share: share of the word pieces that are predicted.
        kept: share of the predicted pieces that are not masked.
        draw: random generator; torch's own by default.
    """
    length = tokens.shape[1]
    columns = torch.arange(most_places(length, share), device=tokens.device)  # [N]
    counted = columns < places_of(ends, length, share).unsqueeze(1)  # [B, N]
    cls, sep, masking = (marks[name] for name in ("CLS", "SEP", "MASK"))
    ordinary = (tokens != cls) & (tokens != sep) & (tokens != masking)
    ordinary &= torch.arange(length, device=tokens.device) < ends.unsqueeze(1)  # [B, T]
    ranks = ordinary.cumsum(1)  # [B, T]
    uniform = torch.rand(2, *counted.shape, device=tokens.device, generator=draw)  # [2, B, N]
    wanted = (uniform[0] * ranks[:, -1:]).long().clamp_max(ranks[:, -1:] - 1) + 1  # [B, N], ranks among ordinary pieces
    # The position of each rank, as `searchsorted` finds it; compilers can fuse this form with its neighbours.
    places = (ranks.unsqueeze(1) < wanted.unsqueeze(2)).sum(2).clamp_max(length - 1)
    places = torch.where(counted, places, 0)
    same = places.unsqueeze(2) == places.unsqueeze(1)  # [B, N, N]
    first = torch.where(same, columns, len(columns)).amin(2)
    hidden = (same & (uniform[1] >= kept).unsqueeze(1)).any(2)  # a position is masked if any of its draws masks it
    answers = tokens.gather(1, places)
    changed = tokens.scatter(1, places, torch.where(hidden & counted, masking, answers))
    return Masked(changed, places, counted.float(), first, answers)
