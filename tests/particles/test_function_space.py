"""Repulsion between outputs: against autograd on the formula, in float64."""

import math

import pytest
import torch
from torch import nn

from repulsive import RuleError
from repulsive.particles import function_repulsion
from repulsive.particles.kernels import Radial

KERNELS = {"rbf": lambda r: torch.exp(-r), "imq": lambda r: (1 + r).rsqrt()}


def by_autograd(outputs: torch.Tensor, kernel: str, h: float) -> torch.Tensor:
    """The formula of the docstring, member by member: the others and h are constants."""
    rows = []
    for i in range(len(outputs)):
        own = outputs[i].clone().requires_grad_()
        total = sum(
            KERNELS[kernel]((own - (own if i == j else outputs[j])).square().sum() / h) for j in range(len(outputs))
        )
        rows.append(torch.autograd.grad(total.log(), own)[0])
    return torch.stack(rows)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bandwidth", [2.5, "paper"])
def test_formula(kernel, bandwidth):
    outputs = torch.randn(5, 7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    median = torch.pdist(outputs.flatten(1)).quantile(0.5).square() / math.log(5)
    h = bandwidth if isinstance(bandwidth, float) else float(median)
    result = function_repulsion(outputs, kernel, bandwidth)
    torch.testing.assert_close(result, by_autograd(outputs, kernel, h), rtol=1e-9, atol=1e-12)


def test_permuting_members_permutes_the_result():
    outputs = torch.randn(4, 6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(function_repulsion(outputs[order]), function_repulsion(outputs)[order])


def test_descent_spreads_members_and_equal_ones_feel_no_force():
    outputs = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    moved = outputs - 0.1 * function_repulsion(outputs)
    assert torch.pdist(moved).mean() > torch.pdist(outputs).mean()
    with pytest.warns(UserWarning, match="equal"):
        assert not function_repulsion(outputs[:1].expand(3, -1)).any()
    assert not function_repulsion(outputs[:1]).any()


def test_through_a_network():
    """Backward from outputs equals the gradient of <outputs, repulsion> with respect to weights."""
    torch.manual_seed(0)
    nets = nn.ModuleList(nn.Linear(3, 2) for _ in range(3)).double()
    outputs = torch.stack([net(torch.ones(4, 3, dtype=torch.float64).cumsum(0)) for net in nets])
    force = function_repulsion(outputs)
    assert not force.requires_grad
    loss = outputs.square().mean()
    expected = torch.autograd.grad(loss + 0.3 * (outputs * force).sum(), list(nets.parameters()), retain_graph=True)
    torch.autograd.backward([loss, outputs], [None, 0.3 * force])
    for parameter, value in zip(nets.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, value)


def test_half_precision():
    outputs = torch.randn(4, 6, 2, generator=torch.Generator().manual_seed(3)).bfloat16()
    result = function_repulsion(outputs)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), function_repulsion(outputs.double()), rtol=1e-2, atol=1e-3)


def test_mistakes_are_named():
    outputs = torch.randn(4, 6)
    with pytest.raises(RuleError, match="expected a kernel of the distance"):
        function_repulsion(outputs, "cosine")
    with pytest.raises(RuleError, match=r"got shape \[4\]"):
        function_repulsion(outputs[:, 0])
    with pytest.raises(RuleError, match="did you mean 'rbf'"):
        function_repulsion(outputs, "rfb")
    assert function_repulsion(outputs, Radial("flat", lambda r: (r * 0 + 1, r * 0))).abs().sum() == 0
