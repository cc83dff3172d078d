"""Batches for pre-training: shuffled passes over all blocks, each batch made when it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from repulsive.lab.systems.electra.masking import places_of


@dataclass(frozen=True)
class BlockBatch:
    """A training batch of blocks.

    Args:
        indices: indices of the blocks, int64 [B].
        length: length of a block in word pieces.
        means: mean numbers of pieces and of predicted positions per block, over the whole batch, float32 [2]; None if
            all blocks are full.
    """

    indices: Tensor
    length: int
    means: Tensor | None = None

    def __len__(self) -> int:
        return len(self.indices)


class BlockBatches:
    """Batches of blocks in random order, shuffled again in every pass; a pass drops its last batch if incomplete.

    Args:
        blocks: number of blocks.
        length: length of a block in word pieces.
        size: number of blocks in a batch.
        seed: random seed of the order.
        ends: length of each block without padding, int16 [N]; None if all are full.
        share: share of the word pieces that are predicted.
        steps: batches in an epoch; 0: as many as one pass over the blocks has.
    """

    def __init__(
        self, blocks: int, length: int, size: int, seed: int, ends: Tensor | None, share: float, steps: int = 0
    ) -> None:
        self._blocks, self._length, self._size, self._seed = blocks, length, size, seed
        self._ends, self._share = ends, share
        self._per_pass = blocks // size  # batches
        self._steps = steps or self._per_pass
        self._passes: dict[int, Tensor] = {}

    def epoch(self, number: int) -> Sequence[BlockBatch]:
        """Return the batches of an epoch."""
        return _Epoch(self, range(number * self._steps, (number + 1) * self._steps))

    def batch(self, number: int) -> BlockBatch:
        """Return batch `number` of the whole training."""
        turn, at = divmod(number, self._per_pass)
        indices = self._shuffled(turn)[at * self._size : (at + 1) * self._size].long()
        if self._ends is None:
            return BlockBatch(indices, self._length)
        ends = self._ends[indices].long()
        places = places_of(ends, self._length, self._share)
        return BlockBatch(indices, self._length, torch.stack([ends, places]).float().mean(1))

    def _shuffled(self, turn: int) -> Tensor:
        if turn not in self._passes:
            draw = torch.Generator().manual_seed(self._seed * 1_000_003 + turn)
            made = torch.randperm(self._blocks, generator=draw, dtype=torch.int32)
            self._passes = {n: x for n, x in self._passes.items() if n == turn - 1} | {turn: made}
        return self._passes[turn]


class _Epoch(Sequence[BlockBatch]):
    """A range of batches, made on access."""

    def __init__(self, batches: BlockBatches, numbers: range) -> None:
        self._batches, self._numbers = batches, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, at: int) -> BlockBatch: ...
    @overload
    def __getitem__(self, at: slice) -> _Epoch: ...
    def __getitem__(self, at: int | slice) -> BlockBatch | _Epoch:
        if isinstance(at, slice):
            return _Epoch(self._batches, self._numbers[at])
        return self._batches.batch(self._numbers[at])
