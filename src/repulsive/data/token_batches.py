"""Batches of sentence pairs with about the same number of tokens, in few shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from repulsive.data.batches import ByLength
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


class TokenBuckets(ByLength[TokenBatch]):
    """Pairs sorted by the longer side, in batches of about as many tokens.

    Both sides are padded to the bucket's bound, and a bucket's batches all have the same number of pairs: there are as
    many shapes as buckets.

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
        lengths = torch.maximum(source, target)  # [N]
        found = bounds(int(lengths.max()))
        super().__init__(lengths, found, [_size(tokens // bound) for bound in found], seed)
        self._target = target.double()

    def batch(self, indices: Tensor, bound: int) -> TokenBatch:
        return TokenBatch(indices, bound, float(self._target[indices].mean()))


def bounds(longest: int) -> list[int]:
    """8, 12, 16, 20, 24, 28, 32, 40, 48, 60, ...: multiples of four; the last is the smallest that holds `longest`."""
    found = [8]
    while found[-1] < longest:
        found.append(max(found[-1] + 4, found[-1] * 5 // 4 // 4 * 4))
    return [*found[:-1], min(found[-1], max(8, -(-longest // 4) * 4))]


def _size(pairs: int) -> int:
    return pairs // _MULTIPLE * _MULTIPLE if pairs >= _MULTIPLE else max(1, pairs)
