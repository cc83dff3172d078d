"""Masking: number and distribution of the positions to predict, and the tokens that replace them."""

import pytest
import torch

from repulsive.lab.systems.electra.masking import mask, most_places, places_of

MARKS = {"PAD": 0, "UNK": 1, "CLS": 2, "SEP": 3, "MASK": 4}


def blocks(count=4, length=128, end=None):
    torch.manual_seed(0)
    tokens = torch.randint(5, 1000, (count, length))
    ends = torch.full((count,), end or length)
    tokens[:, 0] = 2
    tokens[:, length // 2] = 3
    tokens[torch.arange(count), ends - 1] = 3
    tokens[torch.arange(length) >= ends.unsqueeze(1)] = 0
    return tokens, ends


def test_numbers_are_the_official_ones():
    assert most_places(128, 0.15) == 19 and most_places(512, 0.15) == 79
    ends = torch.tensor([1, 3, 10, 64, 128])
    assert places_of(ends, 128, 0.15).tolist() == [1, 1, 2, 10, 19]  # 1.5 becomes 2, as in TensorFlow


@pytest.mark.parametrize("end", [128, 40])
def test_what_a_draw_is_made_of(end):
    tokens, ends = blocks(64, end=end)
    found = mask(tokens, ends, MARKS)
    count = round(0.15 * end)
    assert found.places.shape == (64, 19) and found.counts.sum(1).tolist() == [count] * 64
    for row in range(64):
        drawn = found.places[row, :count]
        assert not found.places[row, count:].any() and int(drawn.max()) < end
        assert not set(tokens[row, drawn].tolist()) & {0, 2, 3, 4}  # neither marks nor padding
        assert found.answers[row, :count].tolist() == tokens[row, drawn].tolist()
        for i, place in enumerate(drawn.tolist()):
            assert int(found.first[row, i]) == drawn.tolist().index(place)
    changed = found.tokens != tokens
    assert bool((found.tokens[changed] == 4).all())
    assert not changed.scatter(1, found.places, False).any()  # only drawn positions change


def test_statistics():
    """About 17.7 distinct positions of 125, 85 % of draws masked, every piece equally often."""
    tokens, ends = blocks(4000)
    found = mask(tokens, ends, MARKS)
    distinct = torch.tensor([len(set(row)) for row in found.places.tolist()]).double()
    expected = 125 * (1 - (1 - 1 / 125) ** 19)  # of 19 draws from 125
    assert float(distinct.mean()) == pytest.approx(expected, abs=0.05) and 17.6 < expected < 17.8
    times = found.places.flatten().bincount(minlength=128)
    assert times[[0, 64, 127]].tolist() == [0, 0, 0]
    usual = times[times > 0].double()
    assert len(usual) == 125 and float(usual.std() / usual.mean()) < 0.06  # 608 draws each: 1 / sqrt(608) = 0.04
    once = (found.places.unsqueeze(2) == found.places.unsqueeze(1)).sum(2) == 1
    masked = (found.tokens.gather(1, found.places) == 4)[once].double().mean()
    assert float(masked) == pytest.approx(0.85, abs=0.005)  # of 66,000: standard deviation 0.0014


def test_draws_are_a_function_of_the_generator():
    tokens, ends = blocks()
    drawn = [mask(tokens, ends, MARKS, draw=torch.Generator().manual_seed(seed)).places for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_a_block_of_marks_alone_does_no_harm():
    tokens = torch.tensor([[2, 3, 0, 0, 0, 0, 0, 0]])
    found = mask(tokens, torch.tensor([2]), MARKS)
    assert int(found.places.max()) < 8 and found.tokens.shape == tokens.shape


def test_places_by_hand():
    """Find the k-th piece that is not a mark, for k = floor(u x their number), in a plain loop."""
    tokens, ends = blocks(8, end=40)
    found = mask(tokens, ends, MARKS, draw=torch.Generator().manual_seed(3))
    uniform = torch.rand(2, 8, 19, generator=torch.Generator().manual_seed(3))
    for row in range(8):
        usual = [place for place in range(40) if int(tokens[row, place]) not in (2, 3, 4)]
        expected = [usual[int(float(u) * len(usual))] for u in uniform[0, row, :6]]
        assert found.places[row].tolist() == expected + [0] * 13
