"""Texts of another data set in the words of a run's own vocabulary: what a model says of what it was not made for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from repulsive.errors import DataError
from repulsive.lab.text.prepared import Part, Prepared
from repulsive.lab.text.tokens import PAD, UNK, Vocabulary


def reencoded(part: Part, words_of: Vocabulary, into: Vocabulary) -> Part:
    """The same sentences with the numbers that another vocabulary gives their words.

    Args:
        part: sentences, numbered by `words_of`.
        words_of: what their numbers mean now.
        into: what they shall mean; words it does not know become unknown. A word `words_of` did not know stays so,
            even where `into` knows it: what it was is not kept.
    """
    table = torch.full((len(words_of),), UNK, dtype=torch.int32)  # [V]
    table[PAD] = PAD
    for word, number in words_of.index.items():
        table[number] = into.index.get(word, UNK)
    sentences = tuple(replace(side, values=table[side.values.long()]) for side in part.sentences)
    return Part(sentences, part.labels)


def unknown_share(part: Part) -> float:
    """Share of the words of a part that are unknown."""
    words = torch.cat([side.values for side in part.sentences])
    return float((words == UNK).double().mean()) if len(words) else 0.0


def open_foreign(folder: Path, own: Prepared, part: str) -> Part:
    """A part of another prepared set in the words of `own`.

    Raises:
        DataError: there is none, it is the runs' own data, or sentences here are pairs there.
    """
    other = Prepared.load(folder)
    if other.manifest["files"] == own.manifest["files"]:
        raise DataError(f"{folder}: is what the runs were trained on; --foreign names other data")
    theirs, ours = len(other.parts[part].sentences), len(own.parts[part].sentences)
    if theirs != ours:
        kinds = {1: "single sentences", 2: "pairs of sentences"}
        raise DataError(f"{folder}: has {kinds[theirs]}, the runs read {kinds[ours]}; choose a set of the same kind")
    return reencoded(other.parts[part], other.vocabulary, own.vocabulary)
