"""Evidence of generated reviews: the words of each sentence about an aspect, one integer per word.

An integer holds the index of the aspect, the position of the word, and whether the word is part of the opinion itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from repulsive.errors import DataError
from repulsive.lab.text.tokens import Ragged

MOST_ASPECTS = 6
_ASPECT_SHIFT, _POSITION_MASK = 17, 0xFFFF  # aspect << 17 | position << 1 | is it the opinion?


def pack_word(aspect: int, position: int, is_opinion: bool) -> int:
    """Pack one word of a sentence about an aspect into an integer.

    Args:
        aspect: index of the aspect.
        position: position of the word in the review.
        is_opinion: the word is the opinion or its negation; False for the rest of the sentence.
    """
    return aspect << _ASPECT_SHIFT | position << 1 | is_opinion


def count_aspects(evidence: Ragged) -> int:
    """Return the number of aspects: 1 + the largest aspect index that occurs."""
    return int(evidence.values.max() >> _ASPECT_SHIFT) + 1 if len(evidence.values) else 0


def unpack_mask(evidence: Ragged, aspects: int, indices: Tensor, length: int, *, sentences: bool = False) -> Tensor:
    """Mark the evidence of each aspect in some reviews.

    Args:
        evidence: packed words of every review.
        aspects: number of aspects K; see `count_aspects`.
        indices: indices of the reviews, int64 [B].
        length: padded length of a review, T.
        sentences: mark the whole sentence about an aspect, not its opinion alone.

    Returns:
        bool [B, K, T], on the device of `evidence`.
    """
    device = evidence.values.device
    packed, counts = evidence.padded(indices.to(device))  # [B, E]
    real = torch.arange(packed.shape[1], device=device) < counts.unsqueeze(1)  # [B, E]
    row, entry = (real if sentences else real & (packed % 2 == 1)).nonzero(as_tuple=True)
    values = packed[row, entry].long()
    mask = torch.zeros(len(indices), aspects, length, dtype=torch.bool, device=device)
    mask[row, values >> _ASPECT_SHIFT, values >> 1 & _POSITION_MASK] = True
    return mask


def check_evidence(evidence: Ragged, lengths: Tensor, where: str) -> None:
    """Raise an error for evidence that does not fit its reviews.

    Args:
        evidence: packed words of every review.
        lengths: lengths of the reviews, int64 [N].
        where: the file, for the error message.

    Raises:
        DataError: an aspect or a position is out of range.
    """
    aspects = evidence.values >> _ASPECT_SHIFT
    ends = lengths.repeat_interleave(evidence.lengths) if len(evidence) == len(lengths) else None  # [entries]
    if ends is None or bool((evidence.values >> 1 & _POSITION_MASK >= ends).any()):
        raise DataError(f"{where}: evidence at positions past the end of a review; prepare it again with --force")
    if len(aspects) and not (int(aspects.min()) >= 0 and int(aspects.max()) < MOST_ASPECTS):
        raise DataError(f"{where}: evidence for aspects out of range; prepare it again with --force")
