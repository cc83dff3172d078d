"""Sentences of a part as the classifiers take them."""

from __future__ import annotations

from torch import Tensor

from repulsive.lab.text.prepared import Part


def model_inputs(part: Part, indices: Tensor, length: int | None = None) -> list[Tensor]:
    """Arguments of a classifier's forward: token ids of each sentence, [B, T], then their lengths, [B].

    Args:
        part: the sentences, or pairs of them.
        indices: which items, int64 [B].
        length: T; None: the longest sentence.
    """
    tables = [sentences.padded(indices, length) for sentences in part.sentences]
    return [table for table, _ in tables] + [lengths for _, lengths in tables]
