"""The Triton noise against `particles.noise`, and its logarithm and cosine against float64."""

import math

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from repulsive.particles import noise  # noqa: E402
from repulsive.repulsion.backends.triton_kernels.noise import (  # noqa: E402
    _GOLDEN,
    _cos_of_turn,
    _key,
    _mix,
    _square_of_radius,
    _transform,
    standard_normal_block,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def store_cosines(turns, out, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    tl.store(out + index, _cos_of_turn(tl.load(turns + index)))


def test_cosine_of_a_turn():
    edges = torch.tensor([0.0, 2**-32, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1 - 2**-24, 1.0])
    turns = torch.cat([edges, torch.rand(4096 - len(edges), generator=torch.Generator().manual_seed(0))]).to(DEVICE)
    out = torch.full_like(turns, torch.nan)
    store_cosines[(1,)](turns, out, COUNT=len(turns))
    assert float((out.double() - (2 * math.pi * turns.double()).cos()).abs().max()) < 3e-7


@triton.jit
def store_squares(numbers, out, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    tl.store(out + index, _square_of_radius(tl.load(numbers + index)))


def test_square_of_the_radius():
    """Small numbers, numbers near 2^32, whose logarithm is near zero, and numbers in between; never negative."""
    source = torch.Generator().manual_seed(0)
    near = 2**32 - 256 * torch.arange(1000)
    between = 2 ** (32 * torch.rand(4096 - 1000 - 100, generator=source, dtype=torch.float64))
    numbers = torch.cat([near, torch.arange(1, 101), between]).float().to(DEVICE)
    out = torch.full_like(numbers, torch.nan)
    store_squares[(1,)](numbers, out, COUNT=4096)
    expected = -2 * (numbers.double() / 2**32).log()
    assert bool((out >= 0).all()) and float(out[0]) == 0
    assert float(((out.double() - expected).abs() / expected.clamp(min=1e-12)).max()) < 2e-7


@triton.jit
def store_noise(stream, step, starts, elements, single, block, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    start, element = tl.load(starts + tl.arange(0, ROWS)), tl.load(elements + tl.arange(0, COLUMNS))
    place = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    index = start[:, None] + element[None, :]
    hashes = _mix(index.to(tl.uint64) * _GOLDEN + _key(tl.load(stream), tl.load(step)))  # one by one
    tl.store(single + place, _transform(hashes))
    tl.store(block + place, standard_normal_block(tl.load(stream), tl.load(step), start, element))


@pytest.mark.parametrize("step", [0, 12_345])
@pytest.mark.parametrize("name", ["q", "layer.3.k"])
def test_the_numbers_of_the_reference(name, step):
    """Indices reach beyond 32 bits, and keys of streams are negative or positive."""
    starts = torch.tensor([0, 589_824, 2**31 + 7, 2**37 - 4096], device=DEVICE)
    elements = torch.arange(512, device=DEVICE) * 3
    stream, at = torch.tensor([noise.stream(7, name)], device=DEVICE), torch.tensor([step], device=DEVICE)
    single, block = torch.empty(2, 4, 512, device=DEVICE)
    store_noise[(1,)](stream, at, starts, elements, single, block, ROWS=4, COLUMNS=512)
    key = noise.key(7, step, name)
    expected = noise.normal(key, starts[:, None] + elements, dtype=torch.float64)
    assert torch.equal(single, block)
    assert float((block.double() - expected).abs().max()) < 1e-4  # u near 1, rounded to float32, moves small numbers
    assert float((block.double() - expected).norm() / expected.norm()) < 1e-6
