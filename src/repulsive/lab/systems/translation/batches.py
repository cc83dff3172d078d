"""Batches of sentence pairs with about the same number of tokens: padded, in few shapes, or packed, in one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from repulsive.errors import DataError
from repulsive.lab.text.batches import ByLength, shuffler

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


@dataclass(frozen=True, eq=False)
class Pack(TokenBatch):
    """Which pairs lie end to end; `length` is the rows that either side has, the unused ones at the end included.

    Args:
        most: pairs of the fullest pack.
        sizes: tokens of source and target, int64 [B, 2].
    """

    most: int
    sizes: Tensor

    def share(self, index: int, processes: int) -> Pack:
        """What one of several processes takes, on as many rows as any of them needs."""
        rows = max(int(self.sizes[i::processes].sum(0).max()) for i in range(min(processes, len(self))))
        mine = slice(index, None, processes)
        return replace(self, indices=self.indices[mine], sizes=self.sizes[mine], length=max(1, rows))


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


class TokenPacks:
    """Packs of pairs with nearly as many tokens as they have rows, in source and target, in one shape.

    Every epoch, pairs are sorted by length, equal ones in random order, and dealt out: of so many alike as there are
    packs each gets one, the longer ones those that have the fewest tokens. So packs differ little in what they hold,
    and every epoch has as many.

    Args:
        source: tokens of each source sentence, int64 [N].
        target: tokens of each target sentence, int64 [N].
        tokens: rows of a side.
        seed: with the epoch, decides who goes together.

    Raises:
        DataError: there are no pairs, or one is longer than a pack.
    """

    _FILL = 0.99  # of the rows, on average, where sentences are short
    _TRIES = 20

    def __init__(self, source: Tensor, target: Tensor, tokens: int, seed: int = 0) -> None:
        if tokens < 1:
            raise ValueError(f"tokens={tokens}: a batch has at least one")
        if not len(source):
            raise DataError("no sentence pairs to make batches of")
        self._sizes = torch.stack([source, target], 1)  # [N, 2]
        longest = int(self._sizes.max())
        if longest > tokens:
            raise DataError(f"training.batch={tokens}: a sentence has {longest} tokens; packs have to hold it")
        self.tokens, self.seed = tokens, seed
        self._count = -(-int(self._sizes.sum(0).max()) // max(1, round(tokens * self._FILL)))
        trial = shuffler(seed, -1)
        while int(self._load(self._deal(torch.randperm(len(source), generator=trial))).max()) > tokens:
            self._count += max(1, self._count // 50)
        self._most = -(-len(source) // self._count)

    def epoch(self, number: int) -> list[Pack]:
        """The packs of one epoch in random order: the same for the same seed and number, on any machine.

        Raises:
            DataError: pairs do not fit; larger packs would.
        """
        generator = shuffler(self.seed, number)
        for _ in range(self._TRIES):
            owner = self._deal(torch.randperm(len(self._sizes), generator=generator))  # [N]
            if int(self._load(owner).max()) <= self.tokens:
                order = torch.randperm(self._count, generator=generator).tolist()
                packs = owner.argsort(stable=True).split(owner.bincount(minlength=self._count).tolist())
                return [self._pack(packs[i]) for i in order]
        raise DataError(f"training.batch={self.tokens}: too small for sentences as long as these; take more")

    def _deal(self, order: Tensor) -> Tensor:
        """The pack of each pair, [N]."""
        order = order[self._sizes.sum(1)[order].argsort(descending=True, stable=True)]
        owner = torch.empty(len(order), dtype=torch.long)
        load = torch.zeros(self._count, 2, dtype=torch.long)
        for turn, some in enumerate(order.split(self._count)):
            side = turn % 2  # source and target are evened out in turn
            longest_first = some[self._sizes[some, side].argsort(descending=True, stable=True)]
            emptiest_first = load[:, side].argsort(stable=True)[: len(some)]
            owner[longest_first] = emptiest_first
            load[emptiest_first] += self._sizes[longest_first]
        return owner

    def _load(self, owner: Tensor) -> Tensor:
        """Tokens of each pack, [packs, 2]."""
        return torch.zeros(self._count, 2, dtype=torch.long).index_add_(0, owner, self._sizes)

    def _pack(self, indices: Tensor) -> Pack:
        sizes = self._sizes[indices]
        return Pack(indices, self.tokens, float(sizes[:, 1].double().mean()), self._most, sizes)


def bounds(longest: int) -> list[int]:
    """8, 12, 16, 20, 24, 28, 32, 40, 48, 60, ...: multiples of four; the last is the smallest that holds `longest`."""
    found = [8]
    while found[-1] < longest:
        found.append(max(found[-1] + 4, found[-1] * 5 // 4 // 4 * 4))
    return [*found[:-1], min(found[-1], max(8, -(-longest // 4) * 4))]


def _size(pairs: int) -> int:
    return pairs // _MULTIPLE * _MULTIPLE if pairs >= _MULTIPLE else max(1, pairs)
