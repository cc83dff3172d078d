"""Batches by tokens: every pair once, few shapes, and the same order for the same seed and epoch."""

import doctest
from collections import Counter
from itertools import pairwise

import pytest
import torch

from repulsive.errors import DataError
from repulsive.lab.systems.translation import batches as token_batches
from repulsive.lab.systems.translation.batches import TokenBuckets, TokenPacks, bounds
from repulsive.lab.text.prefetch import Prefetch

DRAW = torch.Generator().manual_seed(0)
SOURCE = torch.randint(1, 70, (3001,), generator=DRAW)
TARGET = (SOURCE + torch.randint(-8, 9, (3001,), generator=DRAW)).clamp(min=1)


def ids(batches):
    return [batch.indices.tolist() for batch in batches]


@pytest.mark.parametrize("order", [lambda b: b.epoch(3), lambda b: b.in_order()], ids=["epoch", "in order"])
def test_every_pair_once_and_in_few_shapes(order):
    buckets = TokenBuckets(SOURCE, TARGET, 1000)
    found = list(order(buckets))
    assert sorted(i for batch in ids(found) for i in batch) == list(range(3001))
    shapes = Counter((len(batch), batch.length) for batch in found)
    assert len(shapes) <= len(buckets.bounds) + 1 <= 14  # one batch may not be full
    for batch in found:
        assert torch.maximum(SOURCE, TARGET)[batch.indices].max() <= batch.length
        assert batch.tokens == TARGET[batch.indices].double().mean()
    for size, length in shapes:
        assert size * length <= 1000 and (size % 8 == 0 or shapes[size, length] == 1 or size < 8)


def test_little_is_padding():
    found = list(TokenBuckets(SOURCE, TARGET, 1000).epoch(0))
    assert 2 * sum(len(b) * b.length for b in found) < 1.25 * int(SOURCE.sum() + TARGET.sum())


def test_an_epoch_has_always_as_many_batches():
    buckets = TokenBuckets(SOURCE, TARGET, 1000)
    counts = {len(list(buckets.epoch(number))) for number in range(4)}
    assert counts == {len(list(buckets.in_order()))}


def test_order_is_a_function_of_seed_and_epoch():
    first, again = TokenBuckets(SOURCE, TARGET, 500, seed=1), TokenBuckets(SOURCE, TARGET, 500, seed=1)
    later = ids(again.epoch(5))
    assert ids(first.epoch(5)) == later and ids(first.epoch(6)) != later
    assert ids(TokenBuckets(SOURCE, TARGET, 500, seed=2).epoch(5)) != later


def test_a_pair_longer_than_a_batch_is_one_by_itself():
    found = list(TokenBuckets(torch.tensor([50, 3]), torch.tensor([40, 3]), 20).in_order())
    assert [(len(batch), batch.length) for batch in found] == [(1, 12), (1, 52)]  # two would fit into 8


def test_examples_in_docstrings():
    assert doctest.testmod(token_batches).attempted > 0 == doctest.testmod(token_batches).failed


def test_bounds():
    ladder = bounds(1001)
    assert ladder[:8] == [8, 12, 16, 20, 24, 28, 32, 40] and ladder[-2] < 1001 and ladder[-1] == 1004
    assert bounds(1) == bounds(8) == [8] and bounds(9) == [8, 12]
    assert all(b % 4 == 0 and b - a <= max(4, a / 4) for a, b in pairwise(ladder))


def test_what_is_refused():
    with pytest.raises(DataError, match="no sentence pairs"):
        TokenBuckets(SOURCE[:0], TARGET[:0], 10)
    with pytest.raises(ValueError, match="tokens=0"):
        TokenBuckets(SOURCE, TARGET, 0)


# packed


@pytest.mark.parametrize("tokens", [80, 300, 4096, 200_000])
def test_packs_hold_every_pair_once_and_are_nearly_full(tokens):
    packs = TokenPacks(SOURCE, TARGET, tokens, seed=3)
    epochs = [packs.epoch(number) for number in range(3)]
    assert len({len(epoch) for epoch in epochs}) == 1  # every epoch has the same number of steps
    for epoch in epochs:
        assert sorted(i for pack in ids(epoch) for i in pack) == list(range(3001))
        for pack in epoch:
            sizes = torch.stack([SOURCE[pack.indices], TARGET[pack.indices]], 1)
            assert torch.equal(pack.sizes, sizes) and int(sizes.sum(0).max()) <= pack.length == tokens
            assert pack.tokens == TARGET[pack.indices].double().mean()
            assert len(pack) <= pack.most
    assert sum(int(SOURCE.sum()) for _ in epochs) >= (0.97 if tokens == 4096 else 0) * 3 * len(epochs[0]) * tokens


def test_packs_follow_seed_and_epoch():
    first = ids(TokenPacks(SOURCE, TARGET, 1000, seed=1).epoch(4))
    assert first == ids(TokenPacks(SOURCE, TARGET, 1000, seed=1).epoch(4))
    assert first != ids(TokenPacks(SOURCE, TARGET, 1000, seed=2).epoch(4))
    together = {frozenset(pack) for pack in first}
    assert not together & {frozenset(pack) for pack in ids(TokenPacks(SOURCE, TARGET, 1000, seed=1).epoch(5))}


def test_processes_share_a_pack():
    pack = TokenPacks(SOURCE, TARGET, 1000).epoch(0)[0]
    shares = [pack.share(i, 3) for i in range(3)]
    assert sorted(i for share in ids(shares) for i in share) == sorted(pack.indices.tolist())
    assert len({share.length for share in shares}) == 1 and {share.tokens for share in shares} == {pack.tokens}
    assert max(int(share.sizes.sum(0).max()) for share in shares) == shares[0].length < pack.length


def test_packs_refuse():
    with pytest.raises(DataError, match=r"training\.batch=50: expected at least 7"):
        TokenPacks(SOURCE, TARGET, 50)
    with pytest.raises(DataError, match="no sentence pairs"):
        TokenPacks(SOURCE[:0], TARGET[:0], 50)
    with pytest.raises(ValueError, match="at least 1"):
        TokenPacks(SOURCE, TARGET, 0)


def test_the_next_epoch_is_made_ahead():
    made = []
    prefetch = Prefetch(lambda number: made.append(number) or number * 10)
    assert [prefetch(0), prefetch(0), prefetch(1), prefetch(5)] == [0, 0, 10, 50]
    prefetch(6)
    assert made[:5] == [0, 1, 2, 5, 6]
