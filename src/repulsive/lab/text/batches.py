"""Batches of sentences of similar length, in few shapes."""

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
    """A training batch of sentences or other items.

    Args:
        indices: indices of the items, int64 [B].
        length: padded length.
    """

    indices: Tensor
    length: int

    def __len__(self) -> int:
        return len(self.indices)


class ByLength(Generic[T]):
    """Sort sentences into buckets by length and cut batches from them; each sentence is in one batch per epoch.

    Sentences that do not fill a batch move to the next longer bucket, so that at most one batch is not full.

    Args:
        lengths: lengths of the sentences, int64 [N].
        bounds: maximum length in each bucket, ascending; the last one must fit every sentence.
        sizes: batch size of each bucket.
        seed: random seed of the order, together with the number of the epoch.
    """

    def __init__(self, lengths: Tensor, bounds: Sequence[int], sizes: Sequence[int], seed: int) -> None:
        self.lengths = lengths
        self.bounds = list(bounds)
        self.sizes = list(sizes)
        self.seed = seed
        self._bucket = torch.bucketize(lengths, torch.tensor(self.bounds))  # [N]

    def batch(self, indices: Tensor, bound: int) -> T:
        """Make a batch; subclasses implement this.

        Args:
            indices: indices of the batch's sentences, int64 [B].
            bound: the bound of its bucket.
        """
        raise NotImplementedError

    def epoch(self, number: int) -> Iterator[T]:
        """Yield the batches of an epoch in random order; equal seeds and numbers give the same order on any machine."""
        generator = shuffler(self.seed, number)
        order = torch.randperm(len(self.lengths), generator=generator)  # [N]
        batches = self._cut(order)
        for i in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[i]

    def in_order(self) -> Iterator[T]:
        """Yield the batches from short to long, for evaluation; nothing is random."""
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
    """Batches with the same number of sentences each.

    A batch is padded to the bound of its bucket. Bounds grow by at most eight words or a third, so that there are few
    shapes (compiled and captured graphs are reused) and little padding.

    Args:
        lengths: lengths of the sentences, int64 [N]; for a pair, the length of the longer sentence.
        size: number of sentences in a batch.
        seed: random seed of the order, together with the number of the epoch.
        most: maximum padded length; at least the length of the longest sentence.

    Example:
        >>> buckets = Buckets(torch.tensor([3, 30, 5, 4]), size=2)
        >>> [(len(batch), batch.length) for batch in buckets.in_order()]
        [(2, 8), (2, 32)]
    """

    def __init__(self, lengths: Tensor, size: int, seed: int = 0, most: int | None = None) -> None:
        if size < 1:
            raise ValueError(f"size={size}: expected at least one sentence per batch")
        if not len(lengths):
            raise DataError("no sentences to make batches of")
        self.size = size
        longest = int(lengths.max())
        limits = bounds(longest)
        if most is not None:
            if most < longest:
                raise ValueError(f"most={most}: expected at least {longest}, the longest sentence")
            limits[-1] = min(limits[-1], most)
        super().__init__(lengths, limits, [size] * len(limits), seed)

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return -(-len(self.lengths) // self.size)

    def batch(self, indices: Tensor, bound: int) -> Batch:
        return Batch(indices, bound)


def shuffler(seed: int, epoch: int) -> torch.Generator:
    """Make the random generator for the order of an epoch; the same on any machine."""
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def bounds(longest: int) -> list[int]:
    """Return bucket bounds, multiples of eight up to one that fits `longest`: 8, 16, 24, 32, 40, 48, 64, 80, ..."""
    limits = [8]
    while limits[-1] < longest:
        limits.append(max(limits[-1] + 8, limits[-1] * 4 // 3 // 8 * 8))
    return limits
