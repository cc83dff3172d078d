"""Texts of another dataset, encoded with the vocabulary of a run: out-of-distribution data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from repulsive.errors import DataError
from repulsive.lab.engine.assets import sentences_per_item
from repulsive.lab.text.prepared import Part, Prepared
from repulsive.lab.text.tokens import PAD, UNK, Vocabulary


def reencoded(part: Part, words_of: Vocabulary, into: Vocabulary) -> Part:
    """Encode sentences with another vocabulary.

    Args:
        part: sentences as token ids of `words_of`.
        words_of: the vocabulary that these ids refer to.
        into: the vocabulary to use. Words that it lacks become unknown. A word that is unknown in `words_of` stays
            unknown, even if `into` has it: the word itself is not stored.
    """
    table = torch.full((len(words_of),), UNK, dtype=torch.int32)  # [V]
    table[PAD] = PAD
    for word, number in words_of.index.items():
        table[number] = into.index.get(word, UNK)
    sentences = tuple(replace(side, values=table[side.values.long()]) for side in part.sentences)
    return Part(sentences, part.labels)


def unknown_share(part: Part) -> float:
    """Compute the fraction of words in a data split that are unknown."""
    words = torch.cat([side.values for side in part.sentences])
    return float((words == UNK).double().mean()) if len(words) else 0.0


def open_foreign(folder: Path, own: Prepared, part: str) -> Part:
    """Read a split of another prepared dataset and encode it with the vocabulary of `own`.

    Raises:
        DataError: the folder has no prepared data or no such split, it is the runs' own dataset, or only one of the two
            datasets has sentence pairs.
    """
    other = Prepared.load(folder)
    if other.manifest["files"] == own.manifest["files"]:
        raise DataError(f"{folder}: is what the runs were trained on; --foreign names other data")
    if part not in other.parts:
        raise DataError(f"{folder}: has no part {part!r}; choose one of {', '.join(other.parts)}")
    theirs, ours = len(other.parts[part].sentences), sentences_per_item(own)
    if theirs != ours:
        kinds = {1: "single sentences", 2: "pairs of sentences"}
        raise DataError(f"{folder}: has {kinds[theirs]}, the runs read {kinds[ours]}; choose a set of the same kind")
    return reencoded(other.parts[part], other.vocabulary, own.vocabulary)
