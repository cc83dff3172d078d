"""Paragraphs to blocks of one length: [CLS] first segment [SEP] second segment [SEP].

Two ways. "official" is what google-research/electra's builder does: a block ends with its document, what does not fit
is cut off and lost, the rest of a block is padding. "full" has neither: documents follow each other, every block is
full and no token is lost but the last few of a chunk.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import numpy as np

Packing = Literal["official", "full"]
Pieces = list[int]
Segments = tuple[Pieces, Pieces]  # the second may be empty
ALONE = 0.1  # share of blocks with one segment
SHORT = 0.05  # share of official blocks of a random length
SHORTEST = 5
EXTRA = 2  # columns behind the pieces: where the first segment ends, and where the block does


def official(documents: Iterable[Sequence[Pieces]], length: int, draw: random.Random) -> Iterator[Segments]:
    """Blocks as the official builder makes them.

    Args:
        documents: paragraphs in pieces.
        length: of a block.
        draw: decides which blocks have one segment, where others are split, and which are short.
    """
    paragraphs: list[Pieces] = []
    count, wanted = 0, length
    for document in documents:
        for number, pieces in enumerate(document, 1):
            paragraphs.append(pieces)
            count += len(pieces)
            if count >= wanted or (number == len(document) and count):
                yield _split(paragraphs, length, wanted, draw)
                paragraphs, count = [], 0
                wanted = draw.randint(SHORTEST, length) if draw.random() < SHORT else length


def _split(paragraphs: list[Pieces], length: int, wanted: int, draw: random.Random) -> Segments:
    """Two segments, the first about half of what is wanted, and all of it for a tenth of the blocks."""
    half = 100_000 if draw.random() < ALONE else (wanted - 3) // 2
    first: Pieces = []
    second: Pieces = []
    for pieces in paragraphs:
        fits = not first or len(first) + len(pieces) < half
        if fits or (not second and len(first) < half and draw.random() < 0.5):
            first = first + pieces
        else:
            second = second + pieces
    first = first[: length - 2]
    return first, second[: max(0, length - len(first) - 3)]


def full(documents: Iterable[Sequence[Pieces]], length: int, draw: random.Random) -> Iterator[Segments]:
    """Blocks without padding, split at the end of the paragraph that is nearest to their middle.

    Args:
        documents: paragraphs in pieces.
        length: of a block.
        draw: decides which blocks have one segment though a paragraph ends within.
    """
    stream: Pieces = []
    ends: list[int] = []  # of paragraphs
    for document in documents:
        for pieces in document:
            stream += pieces
            ends.append(len(stream))
    start = 0
    while start + length - 2 <= len(stream):
        alone, end = draw.random() < ALONE, start + length - 3
        inside = ends[bisect_right(ends, start) : bisect_left(ends, end)]
        if alone or not inside:
            yield stream[start : end + 1], []
            start = end + 1
        else:
            cut = min(inside, key=lambda place: abs(2 * place - start - end))
            yield stream[start:cut], stream[cut:end]
            start = end


PACKINGS: dict[str, Callable[[Iterable[Sequence[Pieces]], int, random.Random], Iterator[Segments]]] = {
    "official": official,
    "full": full,
}


def as_rows(blocks: Iterable[Segments], length: int, marks: dict[str, int]) -> np.ndarray:
    """Blocks as a table: the pieces, then where the first segment ends and where the block does.

    Args:
        blocks: segments without marks.
        length: of a block.
        marks: numbers of "PAD", "CLS" and "SEP".

    Returns:
        uint16 [N, length + EXTRA].
    """
    pad, cls, sep = (marks[name] for name in ("PAD", "CLS", "SEP"))
    rows = []
    for first, second in blocks:
        row = [cls, *first, sep]
        middle = len(row)
        if second:
            row += [*second, sep]
        rows.append([*row, *[pad] * (length - len(row)), middle, len(row)])
    return np.array(rows, dtype=np.uint16).reshape(-1, length + EXTRA)
