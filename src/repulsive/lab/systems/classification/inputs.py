"""Turn sentences of a data split into the inputs of the classifiers."""

from __future__ import annotations

from torch import Tensor

from repulsive.lab.text.prepared import Part


def model_inputs(part: Part, indices: Tensor, length: int | None = None) -> list[Tensor]:
    """Return the arguments of a classifier's `forward`: token ids of each sentence, [B, T], then their lengths, [B].

    Args:
        part: a data split of sentences or sentence pairs.
        indices: indices of the items to take, int64 [B].
        length: padded length T; None: the length of the longest sentence.
    """
    tables = [sentences.padded(indices, length) for sentences in part.sentences]
    return [table for table, _ in tables] + [lengths for _, lengths in tables]
