"""A second moment that is fixed: the next step in float64, samples with the right variance, and refusals."""

import math

import pytest
import torch
from torch import nn

from repulsive.errors import OptimizerError
from repulsive.repulsion import fix_second_moment
from repulsive.repulsion.optimizer_noise import adam_response, rmsprop_response
from tests.scripts import study
from tests.threads import one_thread  # noqa: F401  an autouse fixture

CASES = {
    "adam": (torch.optim.Adam, {"betas": (0.9, 0.95)}),
    "adam, fused": (torch.optim.Adam, {"betas": (0.9, 0.95), "fused": True}),
    "amsgrad": (torch.optim.Adam, {"betas": (0.9, 0.95), "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"betas": (0.9, 0.95), "weight_decay": 0.0}),
    "rmsprop": (torch.optim.RMSprop, {"alpha": 0.95}),
    "rmsprop, centred": (torch.optim.RMSprop, {"alpha": 0.95, "centered": True}),
}


def trained(kind, options, steps=40):
    weight = nn.Parameter(torch.zeros(6, dtype=torch.float64))
    optimizer = kind([weight], lr=0.01, **options)
    source = torch.Generator().manual_seed(0)
    for _ in range(steps):
        weight.grad = torch.randn(6, dtype=torch.float64, generator=source)
        optimizer.step()
    return weight, optimizer


def response(optimizer, weight):
    respond = rmsprop_response if isinstance(optimizer, torch.optim.RMSprop) else adam_response
    return respond(optimizer.param_groups[0], optimizer.state[weight])


@pytest.mark.parametrize("case", CASES)
def test_steps_keep_their_scale_whatever_gradients_follow(case):
    """With the scale lr / divisor of the last step; Adam's first moment is then an average with weight 0.1."""
    kind, options = CASES[case]
    weight, optimizer = trained(kind, options)
    before = response(optimizer, weight)
    fix_second_moment(optimizer)
    is_adam = kind is not torch.optim.RMSprop
    averaged = 1 - 0.95**40
    scale = before.step * (1 - 0.9**40) / 0.1 if is_adam else before.step  # lr / divisor
    for size in (100.0, 0.0, 1.0):
        start, grad = weight.detach().clone(), torch.full((6,), size, dtype=torch.float64)
        direction = 0.9 * optimizer.state[weight]["exp_avg"] + 0.1 * grad if is_adam else grad
        weight.grad = grad
        optimizer.step()
        assert torch.allclose(start - weight.detach(), scale * direction, rtol=2e-3, atol=1e-12)
    after = response(optimizer, weight)
    assert torch.allclose(after.variance, before.variance / averaged, rtol=2e-3)  # the full temperature


@pytest.mark.parametrize("case", CASES)
def test_the_state_survives_saving_and_a_second_call(case):
    kind, options = CASES[case]
    weight, optimizer = trained(kind, options)
    fix_second_moment(optimizer)
    first = response(optimizer, weight)
    other = nn.Parameter(torch.zeros_like(weight))
    copy = kind([other], lr=0.01, **options)
    copy.load_state_dict(optimizer.state_dict())
    fix_second_moment(copy)
    assert torch.equal(response(copy, other).variance, first.variance)


def test_tiny_second_moments_are_raised():
    weight, optimizer = trained(torch.optim.Adam, {"betas": (0.9, 0.95)})
    square = optimizer.state[weight]["exp_avg_sq"]
    square[0] = 0.0
    mean = float(square.mean()) / (1 - 0.95**40)
    fix_second_moment(optimizer)
    assert math.isclose(float(square[0]), 0.01 * mean, rel_tol=1e-9)


def test_tensors_without_gradients_start_anew():
    weight, optimizer = trained(torch.optim.Adam, {"betas": (0.9, 0.95)})
    unused = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer.add_param_group({"params": [unused]})
    weight.grad = None
    for size in (*[0.0] * 1000, 5.0):
        if size:
            fix_second_moment(optimizer)
        unused.grad = torch.full((3,), size, dtype=torch.float64)
        optimizer.step()
    assert torch.allclose(unused.detach(), torch.full((3,), -0.01, dtype=torch.float64))  # Adam's first step: lr


@pytest.mark.parametrize(("label", "rate"), [("Adam", "betas"), ("RMSprop", "alpha")])
def test_fixed_second_moments_remove_the_excess_of_the_variance(label, rate):
    """A window of two decorrelation times: predicted excess 1 / (1 + 2 * 0.05 * 40) = 0.2. Standard error: 0.01."""
    options = {"betas": (0.9, 0.975)} if rate == "betas" else {"alpha": 0.975}
    with study("studies.sampling.chains") as chains, study("studies.sampling.gaussians") as gaussians:
        found = []
        for is_fixed in (False, True):
            method = chains.Method(label, getattr(torch.optim, label), options, 1.0, True, 40, is_fixed=is_fixed)
            target = gaussians.Target("N(0, 1)", 0.05)
            [result] = gaussians.measure(method, "optimizer", [target], lr=0.05, chains=4096, steps=160, burn_in=240)
            found.append(result.stiff)
    assert found[0] > 1.15 and abs(found[1] - 1) < 0.05, found


def test_wrappers_are_unwrapped():
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

    _, optimizer = trained(torch.optim.Adam, {"betas": (0.9, 0.95)})
    fix_second_moment(Wrapper(optimizer))
    assert optimizer.param_groups[0]["betas"][1] > 1 - 1e-6


def test_refusals():
    weight = nn.Parameter(torch.zeros(3))
    with pytest.raises(OptimizerError, match="supports Adam, AdamW and RMSprop, got SGD"):
        fix_second_moment(torch.optim.SGD([weight], lr=0.1))
    with pytest.raises(OptimizerError, match="Adam has no second moment yet"):
        fix_second_moment(torch.optim.Adam([weight]))
    _, optimizer = trained(torch.optim.Adam, {"betas": (0.9, 0.95)}, steps=19)
    with pytest.raises(OptimizerError, match="averages over 20 steps, and a parameter has had 19"):
        fix_second_moment(optimizer)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
