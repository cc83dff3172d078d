"""Pack paragraphs into blocks of one length: [CLS] first segment [SEP] second segment [SEP].

There are two ways. "official" follows the builder of google-research/electra: a block ends with its document, tokens
that do not fit are dropped, and the rest of a block is padding. "full" has no padding: documents follow each other,
every block is full, and only the last few tokens of a chunk are dropped.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

Pieces = list[int]
Segments = tuple[Pieces, Pieces]  # first and second segment; the second may be empty
ALONE = 0.1  # share of blocks with one segment
SHORT = 0.05  # share of official blocks of a random length
SHORTEST = 5
EXTRA = 2  # columns after the ids: the end of the first segment, and the end of the block


def official(documents: Iterable[Sequence[Pieces]], length: int, draw: random.Random) -> Iterator[Segments]:
    """Pack blocks as the official builder does.

    Args:
        documents: for each document, the token ids of each paragraph.
        length: length of a block in word pieces.
        draw: random generator that chooses blocks with one segment, the split of other blocks, and short blocks.
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
    """Split paragraphs into two segments, the first about half the wanted length; a tenth of the blocks keep one."""
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
    """Pack blocks without padding, split at the end of the paragraph that is nearest to their middle.

    Args:
        documents: for each document, the token ids of each paragraph.
        length: length of a block in word pieces.
        draw: random generator that chooses blocks with one segment although a paragraph ends in them.
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
    """Arrange blocks in rows: the ids, then the end of the first segment and the end of the block.

    Args:
        blocks: segments without [CLS] and [SEP].
        length: length of a block in word pieces.
        marks: ids of "PAD", "CLS" and "SEP".

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
