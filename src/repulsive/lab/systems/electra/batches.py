"""The batches of pre-training: pass after pass over all blocks, each made when asked for, as there may be many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from repulsive.lab.systems.electra.masking import places_of


@dataclass(frozen=True)
class BlockBatch:
    """Some blocks.

    Args:
        indices: int64 [B].
        length: of a block.
        means: pieces and places to be guessed of a block, means over the whole batch, float32 [2]; None where all
            blocks are alike.
    """

    indices: Tensor
    length: int
    means: Tensor | None = None

    def __len__(self) -> int:
        return len(self.indices)


class BlockBatches:
    """Blocks in an order that is a function of the seed and the pass; the last few of a pass may be left out.

    Args:
        blocks: how many there are.
        length: of a block.
        size: blocks of a batch.
        seed: of the order.
        ends: pieces of each block, marks included, int16 [N]; None where all are full.
        share: of the pieces that are to be guessed.
        steps: batches that are called an epoch; 0: one pass.
    """

    def __init__(
        self, blocks: int, length: int, size: int, seed: int, ends: Tensor | None, share: float, steps: int = 0
    ) -> None:
        self._blocks, self._length, self._size, self._seed = blocks, length, size, seed
        self._ends, self._share = ends, share
        self._whole = blocks // size  # batches of a pass
        self._steps = steps or self._whole
        self._passes: dict[int, Tensor] = {}

    def epoch(self, number: int) -> Sequence[BlockBatch]:
        """The batches of an epoch."""
        return _Some(self, range(number * self._steps, (number + 1) * self._steps))

    def batch(self, number: int) -> BlockBatch:
        """Batch `number` of the whole training."""
        turn, at = divmod(number, self._whole)
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


class _Some(Sequence[BlockBatch]):
    """Batches of a range of numbers."""

    def __init__(self, batches: BlockBatches, numbers: range) -> None:
        self._batches, self._numbers = batches, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, at: int) -> BlockBatch: ...
    @overload
    def __getitem__(self, at: slice) -> _Some: ...
    def __getitem__(self, at: int | slice) -> BlockBatch | _Some:
        if isinstance(at, slice):
            return _Some(self._batches, self._numbers[at])
        return self._batches.batch(self._numbers[at])
