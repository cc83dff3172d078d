"""Batches: everything once, little padding, few shapes, the same order for the same seed and epoch."""

from itertools import pairwise

import pytest
import torch

from repulsive.errors import DataError
from repulsive.lab.text.batches import Buckets, bounds
from repulsive.lab.text.tokens import Ragged

LENGTHS = torch.randint(0, 150, (1003,), generator=torch.Generator().manual_seed(0))


def ids(batches):
    return [batch.indices.tolist() for batch in batches]


@pytest.mark.parametrize("size", [1, 16, 64, 2000])
@pytest.mark.parametrize("order", [lambda b: b.epoch(3), lambda b: b.in_order()], ids=["epoch", "in order"])
def test_every_sentence_once_and_batches_full(size, order):
    buckets = Buckets(LENGTHS, size)
    found = list(order(buckets))
    assert sorted(i for batch in ids(found) for i in batch) == list(range(1003))
    assert len(found) == len(buckets)
    assert sum(len(batch) < size for batch in found) <= 1
    for batch in found:
        assert LENGTHS[batch.indices].max() <= batch.length


def test_few_shapes_and_little_padding():
    found = list(Buckets(LENGTHS, 16).epoch(0))
    assert len({batch.length for batch in found}) <= 12
    padded = sum(len(batch) * batch.length for batch in found)
    assert padded < 1.25 * LENGTHS.sum()  # 1.95 without buckets


def test_bounds():
    assert bounds(0) == bounds(8) == [8] and bounds(9) == [8, 16]
    ladder = bounds(2000)
    assert all(b % 8 == 0 and b - a <= max(8, a / 3) for a, b in pairwise(ladder))
    assert ladder[-2] < 2000 <= ladder[-1]


def test_order_is_a_function_of_seed_and_epoch():
    first, again = Buckets(LENGTHS, 16, seed=1), Buckets(LENGTHS, 16, seed=1)
    later = ids(again.epoch(5))
    assert ids(first.epoch(5)) == later  # whatever was drawn before
    assert ids(first.epoch(6)) != later
    assert ids(Buckets(LENGTHS, 16, seed=2).epoch(5)) != later
    assert ids(first.in_order()) == ids(again.in_order())
    state = torch.random.get_rng_state()
    list(first.epoch(1))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_batches_mix_from_epoch_to_epoch():
    buckets = Buckets(LENGTHS, 16)
    mates = [next(set(batch) for batch in ids(buckets.epoch(e)) if 7 in batch) for e in range(2)]
    assert len(mates[0] & mates[1]) < 12


def test_a_batch_fits_the_sentences():
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), LENGTHS.cumsum(0)])
    sentences = Ragged(torch.ones(int(offsets[-1]), dtype=torch.int32), offsets)
    for batch in Buckets(sentences.lengths, 64).epoch(0):
        tokens, lengths = sentences.padded(batch.indices, batch.length)
        assert tokens.shape == (len(batch), batch.length) and torch.equal(tokens.sum(1), lengths)


def test_what_is_refused():
    with pytest.raises(DataError, match="no sentences"):
        Buckets(LENGTHS[:0], 4)
    with pytest.raises(ValueError, match="size=0"):
        Buckets(LENGTHS, 0)
