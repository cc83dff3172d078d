"""norm(x + dropout(change)) in one launch: against torch's own pieces, with the same numbers dropped."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("triton")

from repulsive.lab.layers import residual

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


ALL = 2**32 - 1


def mix(bits):
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B & ALL
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35 & ALL
    return bits ^ (bits >> 16)


def kept(seed, count, dropout):
    """The hash of the kernel, in Python's whole numbers."""
    high = mix(seed >> 32)
    low = mix((seed & ALL) ^ high)
    last = mix((high + low) & ALL)
    return torch.tensor([mix((mix(i ^ low) + last) & ALL) >> 8 >= round(dropout * 2**24) for i in range(count)])


@pytest.mark.parametrize(("rows", "width"), [(7, 24), (64, 32), (1, 512)])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_it_is_what_torch_computes(rows, width, dropout):
    torch.manual_seed(0)
    norm = nn.LayerNorm(width)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    seed = torch.randint(2**62, ())
    x, change = (torch.randn(rows, width) for _ in range(2))
    grad = torch.randn(rows, width)
    results = []
    for device, dtype in ((DEVICE, torch.float32), ("cpu", torch.float64)):
        own = nn.LayerNorm(width).to(device, dtype)
        own.load_state_dict(norm.state_dict())
        a, b = (y.clone().to(device, dtype).requires_grad_() for y in (x, change))
        if dtype == torch.float32:
            out = residual.add_norm(a, b, own, dropout, seed.to(device))
        else:
            mask = kept(int(seed), rows * width, dropout).view(rows, width)
            out = F.layer_norm(a + b * mask / (1 - dropout), (width,), own.weight, own.bias)
        out.backward(grad.to(device, dtype))
        results.append([y.cpu().double() for y in (out, a.grad, b.grad, own.weight.grad, own.bias.grad)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_what_is_dropped_is_random():
    """The right share, another one for another seed, and no pattern over neighbours, rows or columns."""
    norm = nn.LayerNorm(256).to(DEVICE)
    shape = (64, 256)
    masks = []
    for seed in (1, 2, 2**40 + 1):
        change = torch.ones(shape, device=DEVICE, requires_grad=True)
        x = torch.randn(shape, device=DEVICE)
        out = residual.add_norm(x, change, norm, 0.25, torch.tensor(seed, device=DEVICE))
        out.backward(torch.randn(shape, device=DEVICE))
        masks.append((change.grad != 0).double().cpu() - 0.75)
    sd = (0.75 * 0.25) ** 0.5
    for i, a in enumerate(masks):
        assert abs(float(a.mean())) < 4 * sd / 128
        assert a.mean(0).abs().max() < 5 * sd / 8 and a.mean(1).abs().max() < 5 * sd / 16
        for b in (masks[i - 1], a.roll(1, 1), a.roll(1, 0)):
            assert abs(float((a * b).mean())) < 4 * sd**2 / 128


@pytest.mark.gpu
def test_half_precision():
    torch.manual_seed(0)
    norm = nn.LayerNorm(512).cuda()
    x, change = (torch.randn(1000, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    out = residual.add_norm(x, change, norm, 0.0, torch.zeros((), dtype=torch.int64, device="cuda"))
    out.float().square().mean().backward()
    found = [out, x.grad, change.grad]
    exact = norm((x + change).float())
    torch.testing.assert_close(out.float(), exact, rtol=0.02, atol=0.02)
    assert all(y.dtype == torch.bfloat16 and y.isfinite().all() for y in found)
