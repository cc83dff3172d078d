"""Batches by tokens: every pair once, few shapes that repeat, the same order for the same seed and epoch."""

import doctest
from collections import Counter
from itertools import pairwise

import pytest
import torch

from repulsive.data import token_batches
from repulsive.data.token_batches import TokenBuckets, bounds
from repulsive.errors import DataError

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
    assert len(shapes) <= len(buckets.bounds) + 1 <= 14  # one may be left that is not full
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
