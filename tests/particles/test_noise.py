"""Counter-based noise: normal, independent, and equal on every rank."""

import math

import pytest
import torch

from repulsive.particles.noise import key, normal


def test_numbers_are_standard_normal():
    x = normal(key(0, 1, "a"), 400_000, dtype=torch.float64)
    assert abs(float(x.mean())) < 0.006  # four standard errors
    assert abs(float(x.var()) - 1) < 0.01
    assert abs(float(x.pow(3).mean())) < 0.02
    assert abs(float(x.pow(4).mean()) - 3) < 0.07
    cut = x.sort().values
    uniform = torch.special.ndtr(cut)
    distance = (uniform - torch.linspace(0, 1, len(cut), dtype=torch.float64)).abs().max()
    assert distance < 1.95 / len(cut) ** 0.5  # Kolmogorov-Smirnov at 0.1 %


def test_neighbours_and_keys_are_independent():
    a, b, c = (normal(key(*k), 200_000) for k in ((0, 1, "a"), (0, 2, "a"), (0, 1, "b")))
    d = normal(key(1, 1, "a"), 200_000)
    bound = 4.5 / 200_000**0.5
    for x, y in ((a, b), (a, c), (a, d), (a[1:], a[:-1]), (a[::2], a[1::2])):
        assert abs(float(torch.corrcoef(torch.stack([x, y]))[0, 1])) < bound * (len(a) / len(x)) ** 0.5


def test_a_shard_draws_its_own_elements():
    whole = normal(key(7, 3, "layer.q"), 1000)
    shard = torch.arange(1000).view(10, 100)[:, 30:60]
    assert torch.equal(normal(key(7, 3, "layer.q"), shard), whole.view(10, 100)[:, 30:60])


def test_the_rarest_hash_gives_a_finite_number():
    """The upper half is zero in one of 2^32 hashes. Going back through splitmix64's steps gives its index."""
    bits = 0x123  # the hash
    for factor, shift in ((None, 31), (0x94D049BB133111EB, 27), (0xBF58476D1CE4E5B9, 30)):
        if factor is not None:
            bits = bits * pow(factor, -1, 2**64) % 2**64
        bits ^= bits >> shift ^ bits >> 2 * shift  # undoes x ^ x >> shift
    index = bits * pow(0x9E3779B97F4A7C15, -1, 2**64) % 2**64
    found = normal(0, torch.tensor([index - 2**64 if index >= 2**63 else index]), dtype=torch.float64)
    assert float(found) == pytest.approx((2 * 32 * math.log(2)) ** 0.5)


def test_known_bits():
    """splitmix64 from state 0 starts with 0xe220a8397b1dcdaf (its published test value): u1, u2 are its halves."""
    first = ((0xE220A839) + 1) / 2**32
    second = 0x7B1DCDAF / 2**32
    expected = (-2 * torch.tensor(first, dtype=torch.float64).log()).sqrt() * torch.cos(
        2 * torch.pi * torch.tensor(second, dtype=torch.float64)
    )
    found = normal(0, torch.tensor([1]), dtype=torch.float64)  # the generator adds its increment before mixing
    assert torch.allclose(found, expected, rtol=1e-14)
