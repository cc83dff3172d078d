"""Batches of sentence pairs with about the same number of tokens: padded to few shapes, or packed into one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from repulsive.errors import DataError
from repulsive.lab.text.batches import Batch, ByLength, shuffler

_MULTIPLE = 8  # if possible, the number of sentences in a batch is a multiple of this, for efficient matrix products


@dataclass(frozen=True, eq=False)
class TokenBatch(Batch):
    """A training batch of sentence pairs; `length` is the padded length of source and target.

    Args:
        tokens: mean number of target tokens per pair, over the whole batch. A rank that takes a share of the batch
            divides by it too, so that the loss is a mean over tokens for any number of ranks.
    """

    tokens: float


@dataclass(frozen=True, eq=False)
class Pack(TokenBatch):
    """A batch of sentence pairs stored end to end; `length` is the rows of source and of target, unused rows included.

    Args:
        most: maximum number of pairs in a pack.
        sizes: tokens of source and target, int64 [B, 2].
    """

    most: int
    sizes: Tensor

    def share(self, index: int, processes: int) -> Pack:
        """Return the share of one rank, with as many rows as any rank needs."""
        rows = max(int(self.sizes[i::processes].sum(0).max()) for i in range(min(processes, len(self))))
        mine = slice(index, None, processes)
        return replace(self, indices=self.indices[mine], sizes=self.sizes[mine], length=max(1, rows))


class TokenBuckets(ByLength[TokenBatch]):
    """Padded batches of pairs, sorted by their longer side, with about the same number of tokens.

    Both sides are padded to the bound of their bucket, and all batches of a bucket have the same number of pairs, so
    that there are as many shapes as buckets.

    Args:
        source: tokens of each source sentence, int64 [N].
        target: tokens of each target sentence, int64 [N].
        tokens: maximum number of source or of target tokens in a batch, with padding; a longer pair is a batch alone.
        seed: random seed of the order, together with the number of the epoch.

    Example:
        >>> buckets = TokenBuckets(torch.tensor([3, 10, 5]), torch.tensor([4, 9, 2]), tokens=24)
        >>> [(len(batch), batch.length, batch.tokens) for batch in buckets.in_order()]
        [(2, 12, 3.0), (1, 12, 9.0)]
    """

    def __init__(self, source: Tensor, target: Tensor, tokens: int, seed: int = 0) -> None:
        if tokens < 1:
            raise ValueError(f"tokens={tokens}: expected at least 1")
        if not len(source):
            raise DataError("no sentence pairs to make batches of")
        lengths = torch.maximum(source, target)  # [N]
        limits = bounds(int(lengths.max()))
        super().__init__(lengths, limits, [_size(tokens // bound) for bound in limits], seed)
        self._target = target.double()

    def batch(self, indices: Tensor, bound: int) -> TokenBatch:
        return TokenBatch(indices, bound, float(self._target[indices].mean()))


class TokenPacks:
    """Packs of pairs that all have the same shape and are nearly full.

    In every epoch, pairs are sorted by length (equal ones in random order) and dealt out to the packs in rounds. In
    each round every pack gets one pair, and the packs with the fewest tokens get the longest pairs. All packs then have
    similar sizes, and every epoch has the same number of packs.

    Args:
        source: tokens of each source sentence, int64 [N].
        target: tokens of each target sentence, int64 [N].
        tokens: rows of the source and of the target in a pack.
        seed: random seed of the packs, together with the number of the epoch.

    Raises:
        DataError: there are no pairs, or one is longer than a pack.
    """

    _FILL = 0.99  # mean share of used rows to aim at
    _TRIES = 20

    def __init__(self, source: Tensor, target: Tensor, tokens: int, seed: int = 0) -> None:
        if tokens < 1:
            raise ValueError(f"tokens={tokens}: expected at least 1")
        if not len(source):
            raise DataError("no sentence pairs to make batches of")
        self._sizes = torch.stack([source, target], 1)  # [N, 2]
        longest = int(self._sizes.max())
        if longest > tokens:
            raise DataError(f"training.batch={tokens}: expected at least {longest}, the longest sentence in tokens")
        self.tokens, self.seed = tokens, seed
        self._count = -(-int(self._sizes.sum(0).max()) // max(1, round(tokens * self._FILL)))
        trial = shuffler(seed, -1)
        while int(self._load(self._assign_packs(torch.randperm(len(source), generator=trial))).max()) > tokens:
            self._count += max(1, self._count // 50)
        self._most = -(-len(source) // self._count)

    def epoch(self, number: int) -> list[Pack]:
        """Return the packs of one epoch in random order; the same seed and number give the same on any machine.

        Raises:
            DataError: the pairs do not fit into the packs.
        """
        generator = shuffler(self.seed, number)
        for _ in range(self._TRIES):
            owner = self._assign_packs(torch.randperm(len(self._sizes), generator=generator))  # [N]
            if int(self._load(owner).max()) <= self.tokens:
                order = torch.randperm(self._count, generator=generator).tolist()
                packs = owner.argsort(stable=True).split(owner.bincount(minlength=self._count).tolist())
                return [self._pack(packs[i]) for i in order]
        raise DataError(f"training.batch={self.tokens}: too small to pack sentences of these lengths; raise it")

    def _assign_packs(self, order: Tensor) -> Tensor:
        """Return the pack of each pair, [N]."""
        order = order[self._sizes.sum(1)[order].argsort(descending=True, stable=True)]
        owner = torch.empty(len(order), dtype=torch.long)
        load = torch.zeros(self._count, 2, dtype=torch.long)
        for turn, some in enumerate(order.split(self._count)):
            side = turn % 2  # balance source and target alternately
            longest_first = some[self._sizes[some, side].argsort(descending=True, stable=True)]
            emptiest_first = load[:, side].argsort(stable=True)[: len(some)]
            owner[longest_first] = emptiest_first
            load[emptiest_first] += self._sizes[longest_first]
        return owner

    def _load(self, owner: Tensor) -> Tensor:
        """Count the tokens of each pack, [packs, 2]."""
        return torch.zeros(self._count, 2, dtype=torch.long).index_add_(0, owner, self._sizes)

    def _pack(self, indices: Tensor) -> Pack:
        sizes = self._sizes[indices]
        return Pack(indices, self.tokens, float(sizes[:, 1].double().mean()), self._most, sizes)


def bounds(longest: int) -> list[int]:
    """Return bucket bounds, multiples of four: 8, 12, 16, 20, 24, 28, 32, 40, 48, ...; the last just fits `longest`."""
    limits = [8]
    while limits[-1] < longest:
        limits.append(max(limits[-1] + 4, limits[-1] * 5 // 4 // 4 * 4))
    return [*limits[:-1], min(limits[-1], max(8, -(-longest // 4) * 4))]


def _size(pairs: int) -> int:
    return pairs // _MULTIPLE * _MULTIPLE if pairs >= _MULTIPLE else max(1, pairs)
