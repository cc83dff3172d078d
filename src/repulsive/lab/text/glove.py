"""Pre-trained GloVe vectors for the words of a vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from repulsive.errors import DataError
from repulsive.lab.text.lines import read_lines

_RESERVED = 2  # padding and the unknown word have no pre-trained vector


@dataclass(frozen=True, eq=False)
class Vectors:
    """Word vectors of a vocabulary.

    Args:
        table: float32 [words, size]; padding is zero, words without a vector are random.
        found: bool [words], whether a word has a pre-trained vector.
    """

    table: Tensor
    found: Tensor

    @property
    def coverage(self) -> float:
        """Share of words with a pre-trained vector, among all words but padding and the unknown word."""
        return float(self.found[_RESERVED:].double().mean()) if len(self.found) > _RESERVED else 0.0

    def coverage_of(self, tokens: Tensor) -> float:
        """Compute the share of tokens (ids of any shape) that have a pre-trained vector; padding is excluded."""
        real = tokens[tokens != 0].long()
        return float(self.found[real].double().mean()) if len(real) else 0.0


def read_glove(path: str | Path, words: Sequence[str], size: int | None = None, *, seed: int = 0) -> Vectors:
    """Read vectors from a GloVe text file: a word and its numbers on each line, separated by single spaces.

    A word without a vector takes the vector of its lower-case form. Words with neither are drawn from a normal
    distribution with the mean and deviation of the others, per dimension.

    Args:
        path: the file, plain, gzip or xz.
        words: the vocabulary, padding and the unknown word first.
        size: dimension of the vectors; None: that of the first line. If given, any other dimension is an error.
        seed: random seed of the random vectors.

    Raises:
        DataError: a line has too few numbers or an invalid one, the dimension differs from `size`, the file is empty,
            or it has no word of the vocabulary.
    """
    exact = {word: i for i, word in enumerate(words) if i >= _RESERVED}
    cased: dict[str, list[int]] = {}
    for word, i in exact.items():
        if word != word.lower():
            cased.setdefault(word.lower(), []).append(i)
    table: Tensor | None = None
    own: set[int] = set()
    borrowed: set[int] = set()
    width = size or 0
    for number, line in read_lines(path):
        line = line.rstrip(" ")
        spaces = line.count(" ")
        if table is None:
            if spaces == 1 and line.replace(" ", "").isdigit():
                continue  # the first line of word2vec's text format: count and dimension
            if size is not None and spaces > size:
                raise DataError(f"{path}, line {number}: {spaces} numbers after the word, expected {size}")
            width = width or spaces
            table = torch.zeros(len(words), width)
        if spaces < width or not spaces:
            raise DataError(f"{path}, line {number}: {spaces} numbers after the word, expected {width}")
        word, _, rest = line.partition(" ")
        if spaces > width or (word not in exact and word not in cased):
            continue  # not in the vocabulary; or a "word" with spaces in it, as in the 840B file
        vector = _numbers(path, number, rest)  # [size]
        for i in cased.get(word, []):
            if i not in own:
                table[i] = vector
                borrowed.add(i)
        if word in exact:
            table[exact[word]] = vector
            own.add(exact[word])
    if table is None:
        raise DataError(f"{path}: empty file")
    if not own | borrowed:
        raise DataError(f"{path}: has none of the {len(exact)} words of the vocabulary; is it the right file?")
    found = torch.zeros(len(words), dtype=torch.bool)
    found[sorted(own | borrowed)] = True
    return Vectors(_fill(table, found, seed), found)


def _numbers(path: str | Path, number: int, text: str) -> Tensor:
    try:
        vector = torch.tensor([float(value) for value in text.split(" ")])
    except ValueError as error:
        raise DataError(f"{path}, line {number}: {error}; is it a file of word vectors?") from None
    if not vector.isfinite().all():
        raise DataError(f"{path}, line {number}: a vector with infinite or NaN values")
    return vector


def _fill(table: Tensor, found: Tensor, seed: int) -> Tensor:
    mean, deviation = table[found].mean(0), table[found].std(0, correction=0)  # [size]
    noise = torch.randn(table.shape, generator=torch.Generator().manual_seed(seed))
    table = torch.where(found.unsqueeze(1), table, mean + deviation * noise)
    table[0] = 0  # padding
    return table
