"""Batches of sentences of about the same length, in few shapes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from repulsive.errors import DataError

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Batch:
    """Which sentences go together.

    Args:
        indices: int64 [B].
        length: to pad them to.
    """

    indices: Tensor
    length: int

    def __len__(self) -> int:
        return len(self.indices)


class ByLength(Generic[T]):
    """Sorts sentences into buckets by length and cuts batches from them; every sentence is in one batch an epoch.

    What is left of a bucket moves on to the next longer one, so that one batch at most is not full.

    Args:
        lengths: of the sentences, int64 [N].
        bounds: longest sentence of each bucket, rising; the last holds all.
        sizes: sentences in a batch of each bucket.
        seed: with the epoch, decides the order.
    """

    def __init__(self, lengths: Tensor, bounds: Sequence[int], sizes: Sequence[int], seed: int) -> None:
        self.lengths = lengths
        self.bounds = list(bounds)
        self.sizes = list(sizes)
        self.seed = seed
        self._bucket = torch.bucketize(lengths, torch.tensor(self.bounds))  # [N]

    def batch(self, indices: Tensor, bound: int) -> T:
        """What a batch is; each kind of buckets says it."""
        raise NotImplementedError

    def epoch(self, number: int) -> Iterator[T]:
        """The batches of one epoch in random order: the same for the same seed and number, on any machine."""
        generator = shuffler(self.seed, number)
        order = torch.randperm(len(self.lengths), generator=generator)  # [N]
        batches = self._cut(order)
        for i in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[i]

    def in_order(self) -> Iterator[T]:
        """The batches from short to long, nothing random: for evaluation."""
        yield from self._cut(self.lengths.argsort(stable=True))

    def _cut(self, order: Tensor) -> list[T]:
        batches: list[T] = []
        left = order[:0]
        for bucket, (bound, size) in enumerate(zip(self.bounds, self.sizes, strict=True)):
            waiting = torch.cat([left, order[self._bucket[order] == bucket]])
            full = len(waiting) // size * size
            batches += [self.batch(part, bound) for part in waiting[:full].split(size)] if full else []
            left = waiting[full:]
        return [*batches, self.batch(left, self.bounds[-1])] if len(left) else batches


class Buckets(ByLength[Batch]):
    """Batches of one size, whatever the length.

    A batch is padded to its bucket's bound, so there are as many lengths as buckets, each at most eight words or a
    third longer than the one before: compiled and captured graphs are reused, and little is padding.

    Args:
        lengths: of the sentences, int64 [N]; of pairs, the longer of the two.
        size: sentences in a batch.
        seed: with the epoch, decides the order.
        most: longer than this no batch is padded; at least as long as the longest sentence.

    Example:
        >>> buckets = Buckets(torch.tensor([3, 30, 5, 4]), size=2)
        >>> [(len(batch), batch.length) for batch in buckets.in_order()]
        [(2, 8), (2, 32)]
    """

    def __init__(self, lengths: Tensor, size: int, seed: int = 0, most: int | None = None) -> None:
        if size < 1:
            raise ValueError(f"size={size}: a batch has at least one sentence")
        if not len(lengths):
            raise DataError("no sentences to make batches of")
        self.size = size
        longest = int(lengths.max())
        found = bounds(longest)
        if most is not None:
            if most < longest:
                raise ValueError(f"most={most}: there is a sentence of {longest}")
            found[-1] = min(found[-1], most)
        super().__init__(lengths, found, [size] * len(found), seed)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return -(-len(self.lengths) // self.size)

    def batch(self, indices: Tensor, bound: int) -> Batch:
        return Batch(indices, bound)


def shuffler(seed: int, epoch: int) -> torch.Generator:
    """What decides the order of an epoch, the same on any machine."""
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def bounds(longest: int) -> list[int]:
    """8, 16, 24, 32, 40, 48, 64, 80, 104, ...: multiples of eight, until one holds `longest`."""
    found = [8]
    while found[-1] < longest:
        found.append(max(found[-1] + 8, found[-1] * 4 // 3 // 8 * 8))
    return found
