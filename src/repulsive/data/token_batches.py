"""Batches of sentence pairs with about the same number of tokens, in few shapes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from repulsive.errors import DataError

_MULTIPLE = 8  # of sentences in a batch, where it holds so many: what GPUs multiply best


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Which pairs go together.

    Args:
        indices: int64 [B].
        length: to pad both sides to.
        tokens: target tokens a pair has, on average over the whole batch; a process that takes a share of the batch
            divides by it too, so that the loss is a mean over tokens whoever computes it.
    """

    indices: Tensor
    length: int
    tokens: float

    def __len__(self) -> int:
        return len(self.indices)


class TokenBuckets:
    """Sorts pairs into buckets by the longer side and cuts batches from them; every pair is in one batch an epoch.

    Both sides are padded to the bucket's bound, and a bucket's batches all have the same number of pairs: there are as
    many shapes as buckets. What is left of a bucket moves on to the next longer one, so that one batch at most is not
    full.

    Args:
        source: tokens of each source sentence, int64 [N].
        target: tokens of each target sentence, int64 [N].
        tokens: of one side of a batch, padding included; a longer pair is a batch of its own.
        seed: with the epoch, decides the order.

    Example:
        >>> buckets = TokenBuckets(torch.tensor([3, 10, 5]), torch.tensor([4, 9, 2]), tokens=24)
        >>> [(len(batch), batch.length, batch.tokens) for batch in buckets.in_order()]
        [(2, 12, 3.0), (1, 12, 9.0)]
    """

    def __init__(self, source: Tensor, target: Tensor, tokens: int, seed: int = 0) -> None:
        if tokens < 1:
            raise ValueError(f"tokens={tokens}: a batch has at least one")
        if not len(source):
            raise DataError("no sentence pairs to make batches of")
        self.lengths = torch.maximum(source, target)  # [N]
        self.seed = seed
        self.bounds = bounds(int(self.lengths.max()))
        self.sizes = [_size(tokens // bound) for bound in self.bounds]
        self._target = target.double()
        self._bucket = torch.bucketize(self.lengths, torch.tensor(self.bounds))  # [N]

    def epoch(self, number: int) -> Iterator[TokenBatch]:
        """The batches of one epoch in random order: the same for the same seed and number, on any machine."""
        digest = hashlib.sha256(f"{self.seed}/{number}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        order = torch.randperm(len(self.lengths), generator=generator)  # [N]
        batches = self._cut(order)
        for i in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[i]

    def in_order(self) -> Iterator[TokenBatch]:
        """The batches from short to long, nothing random: for evaluation."""
        yield from self._cut(self.lengths.argsort(stable=True))

    def _cut(self, order: Tensor) -> list[TokenBatch]:
        batches: list[TokenBatch] = []
        left = order[:0]
        for bucket, (bound, size) in enumerate(zip(self.bounds, self.sizes, strict=True)):
            waiting = torch.cat([left, order[self._bucket[order] == bucket]])
            full = len(waiting) // size * size
            batches += [self._batch(part, bound) for part in waiting[:full].split(size)] if full else []
            left = waiting[full:]
        return [*batches, self._batch(left, self.bounds[-1])] if len(left) else batches

    def _batch(self, indices: Tensor, bound: int) -> TokenBatch:
        return TokenBatch(indices, bound, float(self._target[indices].mean()))


def bounds(longest: int) -> list[int]:
    """8, 12, 16, 20, 24, 28, 32, 40, 48, 60, ...: multiples of four; the last is the smallest that holds `longest`."""
    found = [8]
    while found[-1] < longest:
        found.append(max(found[-1] + 4, found[-1] * 5 // 4 // 4 * 4))
    return [*found[:-1], min(found[-1], max(8, -(-longest // 4) * 4))]


def _size(pairs: int) -> int:
    return pairs // _MULTIPLE * _MULTIPLE if pairs >= _MULTIPLE else max(1, pairs)
