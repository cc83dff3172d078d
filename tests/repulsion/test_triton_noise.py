"""The cosine of the Triton noise against float64."""

import math

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from repulsive.repulsion.backends.triton_kernels.noise import _cos_of_turn  # noqa: E402

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
