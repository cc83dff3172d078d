"""Duplicate heads in a model, under both backends: repulsion holds its ratio, or is zero; the user is warned."""

import warnings

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from repulsive import SGLD, SPOS, SVGD, CollapsedHeads, repel
from repulsive.repulsion.backends import launch_settings

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
RATIO = 0.01


@pytest.fixture(params=["eager", "triton"])
def backend(request, monkeypatch):
    monkeypatch.setenv("REPULSIVE_KERNELS", request.param)
    if not GPU:
        monkeypatch.setattr(launch_settings, "SPLITS", 2)  # the interpreter runs programs one by one


def relative_push(heads: int, second: float, apart: float, kernel: str) -> tuple[float, float]:
    """Make head 1 of q a multiple of head 0, take a step, and return |repulsion| / |gradient|, computed and reported.

    Args:
        heads: number of heads.
        second: the factor.
        apart: size of random numbers that are added to head 1.
        kernel: name of the kernel.
    """
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, heads, 16, dropout=0.0, batch_first=True)
    weight = layer.self_attn.in_proj_weight
    size = 16 // heads
    with torch.no_grad():
        weight[size : 2 * size] = second * weight[:size] + apart * torch.randn(size, 16)
    layer.to(DEVICE)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    rule = SVGD("heads", kernel=kernel, space="sphere", smoothing=0, alpha="auto", ratio=RATIO)
    handle = repel(layer, optimizer, rule, parts="q", verbose=False)
    layer(torch.randn(2, 3, 16, device=DEVICE)).pow(3).mean().backward()
    before = weight.grad[:16].clone()
    optimizer.step()
    return float((weight.grad[:16] - before).norm() / before.norm()), handle.report()[0].ratio


@pytest.mark.filterwarnings("ignore::repulsive.CollapsedHeads")
def test_one_pair_of_equal_heads_is_not_pushed(backend):
    """A force of rounding errors was scaled up: gradients grew by a factor of a million, and the report said 0.01."""
    actual, reported = relative_push(4, 1.0, 0.0, "hinge")
    assert actual < 0.02 * RATIO and reported < 0.02 * RATIO


@pytest.mark.filterwarnings("ignore::repulsive.CollapsedHeads")
@pytest.mark.parametrize("kernel", ["hinge", "cosine", "rbf"])
def test_two_parallel_heads_are_not_pushed(kernel, backend):
    actual, reported = relative_push(2, 1.7, 0.0, kernel)
    assert actual < 0.1 * RATIO and reported < 0.1 * RATIO


@pytest.mark.parametrize(("heads", "kernel"), [(4, "hinge"), (2, "rbf")])
def test_heads_a_percent_apart_hold_the_ratio(heads, kernel, backend):
    actual, reported = relative_push(heads, 1.7, 1e-3, kernel)  # weights are about 0.2
    assert actual == pytest.approx(RATIO, rel=0.05) and reported == pytest.approx(RATIO, rel=1e-3)


@pytest.mark.filterwarnings("ignore::repulsive.CollapsedHeads")
def test_heads_too_close_for_the_ratio_are_still_pushed_apart(backend):
    actual, _ = relative_push(4, 1.0, 1e-5, "hinge")
    assert 0.01 * RATIO < actual < 1.05 * RATIO


def collapse_warnings(rule, equal: int, apart: float = 0.0, scale: float = 1.0) -> list[str]:
    """Give the first heads of q the same weights, take three steps, and return the warnings about it."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 16, dropout=0.0, batch_first=True)
    with torch.no_grad():
        heads = layer.self_attn.in_proj_weight[:16].view(4, 4, 16)
        heads[:equal] = scale * heads[:1] + apart * torch.randn(equal, 4, 16)
    layer.to(DEVICE)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-3)
    repel(layer, optimizer, rule, parts="q", verbose=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CollapsedHeads)
        for _ in range(3):
            layer(torch.randn(2, 3, 16, device=DEVICE)).pow(3).mean().backward()
            optimizer.step()
    return [str(one.message) for one in caught if one.category is CollapsedHeads]


KERNELS = [
    SVGD(kernel="rbf"),
    SVGD(kernel="imq", bandwidth=2.0, space="sphere"),
    SVGD(kernel="cosine"),
    SVGD("heads", kernel="hinge", space="sphere"),
]


@pytest.mark.parametrize("rule", KERNELS, ids=lambda rule: rule.kernel)
def test_equal_heads_are_warned_about_with_every_kernel(rule, backend):
    (all_heads,) = collapse_warnings(rule, 4)
    assert all_heads.startswith("self_attn.q: all heads of a group are equal")
    (pair,) = collapse_warnings(rule, 2)
    assert pair.startswith("self_attn.q: two heads of a group are equal or parallel")
    assert collapse_warnings(rule, 2, apart=1e-3) == []


@pytest.mark.parametrize("rule", [SPOS(), SGLD(), None], ids=str)
def test_noise_separates_equal_heads(rule):
    assert collapse_warnings(rule, 2) == []


def test_new_lora_adapters_are_no_problem_without_smoothing(backend):
    assert collapse_warnings("recommended", 4, scale=0.0) == []
    (warning,) = collapse_warnings("paper", 4, scale=0.0)
    assert "all heads of a group are equal" in warning
