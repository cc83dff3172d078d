"""Products on tensor cores as sums of TF32 products, against float64."""

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from repulsive import SVGD  # noqa: E402
from repulsive.repulsion.backends import launch_settings  # noqa: E402
from repulsive.repulsion.backends.triton_kernels.products import add_squares, product, split  # noqa: E402
from tests.repulsion.fused_weights import DEVICE, Weights, error, few_programs, run  # noqa: E402, F401


@triton.jit
def store_parts(numbers, big, small, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    first, rest = split(tl.load(numbers + index))
    tl.store(big + index, first)
    tl.store(small + index, rest)


@triton.jit
def store_products(a, x, plain, squares, PRECISION: tl.constexpr):
    i, k = tl.arange(0, 16), tl.arange(0, 64)
    left, right = tl.load(a + i[:, None] * 16 + i[None, :]), tl.load(x + i[:, None] * 64 + k[None, :])
    tl.store(plain + i[:, None] * 64 + k[None, :], product(left, right, PRECISION))
    zero = tl.zeros([16, 16], dtype=tl.float32)
    total, rest = add_squares(zero, zero, right, PRECISION)
    tl.store(squares + i[:, None] * 16 + i[None, :], total + rest + tl.trans(rest))


def test_parts_add_up_without_error():
    source = torch.Generator().manual_seed(0)
    numbers = torch.randn(4096, generator=source) * 10 ** (6 * torch.rand(4096, generator=source) - 3)
    numbers[:4] = torch.tensor([0.0, 1.0, -(2 - 2**-23), 1 + 2**-11])  # the third is rounded up to a power of two
    big, small = torch.empty(2, 4096, device=DEVICE)
    store_parts[(1,)](numbers.to(DEVICE), big, small, COUNT=4096)
    big, small = big.cpu(), small.cpu()
    assert torch.equal(big.double() + small.double(), numbers.double())
    assert torch.equal(big.view(torch.int32) & 0x1FFF, torch.zeros(4096, dtype=torch.int32)), "more than 11 bits"
    assert bool((small.abs() <= 2.0**-11 * numbers.abs()).all())
    assert big[2] == -2


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF])
def test_nan_stays_nan(bits):
    """Also the one that GPUs produce, whose bits overflow when they are rounded."""
    numbers = torch.full((16,), bits, dtype=torch.int32, device=DEVICE).view(torch.float32)
    big, small = torch.empty(2, 16, device=DEVICE)
    store_parts[(1,)](numbers, big, small, COUNT=16)
    assert bool(small.isnan().all())


@pytest.mark.parametrize("precision", ["split", "tf32x3", "ieee"])
def test_products_are_as_accurate_as_float32(precision):
    torch.manual_seed(0)
    a, x = torch.randn(16, 16, device=DEVICE), torch.randn(16, 64, device=DEVICE)
    plain, squares = torch.empty(16, 64, device=DEVICE), torch.empty(16, 16, device=DEVICE)
    store_products[(1,)](a, x, plain, squares, PRECISION=precision)
    for found, left, right in ((plain, a, x), (squares, x, x.T)):
        expected = left.double() @ right.double()
        assert float((found.double() - expected).norm() / expected.norm()) < 5e-7


@pytest.mark.parametrize("precision", ["split", "tf32x3"])
@pytest.mark.parametrize("rule", [SVGD(alpha=1.0), SVGD(alpha="auto", ratio=0.5)], ids=["given", "auto"])
def test_an_update_with_either_precision(rule, precision, monkeypatch):
    monkeypatch.setitem(launch_settings.PRECISION, 16, precision)
    torch.manual_seed(0)
    model = Weights(12, 2, 8, torch.float32)
    groups = [model.groups[1], model.groups[-1]]
    expected, _ = run(model, groups, rule, monkeypatch, "eager")
    found, _ = run(model, groups, rule, monkeypatch, "triton")
    assert error(found, expected) < 3e-6


def test_the_number_of_programs_changes_nothing(monkeypatch):
    """Programs of several blocks, the last one not full, in every launch; gradients agree up to rounding."""
    torch.manual_seed(0)
    model = Weights(12, 4, 25, torch.float32)
    groups, found = [model.groups[0], model.groups[-1]], []
    monkeypatch.setattr(launch_settings, "LEAST", 1)
    monkeypatch.setitem(launch_settings.GRAM, 16, {"BLOCK": 16, "num_warps": 1})
    monkeypatch.setitem(launch_settings.COMBINE, 16, {"BLOCK": 16, "num_warps": 1})
    for programs in (2, 7):
        monkeypatch.setitem(launch_settings.PROGRAMS, 16, {"gram": programs, "combine": programs})
        found.append(run(model, groups, SVGD(alpha=1.0), monkeypatch, "triton")[0])
    expected, _ = run(model, groups, SVGD(alpha=1.0), monkeypatch, "eager")
    assert all(error(gradients, expected) < 3e-6 for gradients in found)
