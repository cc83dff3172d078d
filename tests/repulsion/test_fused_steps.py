"""Several steps with the Triton kernels: noise, training through the handle, and weights that move in memory."""

import math

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
from repulsive import SPOS, SVGD, repel
from repulsive.repulsion.backends.choose import Update
from repulsive.repulsion.backends.inputs import StepInputs
from tests.repulsion.fused_weights import (
    DEVICE,
    Weights,
    error,
    few_programs,  # noqa: F401  an autouse fixture
    gradients,
    run,
)


@pytest.mark.parametrize("noise", ["langevin", pytest.param("released", marks=pytest.mark.slow)])
def test_a_step_counts_noise_like_the_reference(noise, monkeypatch):
    """Several steps with different gradients, one of them after a jump as by load_state_dict."""
    torch.manual_seed(0)
    model, rule = Weights(4, 4, 24, torch.float32), SPOS(0.1, 1.0, 10.0, noise=noise)
    update, rates = Update(model.layouts, seed=7), {id(p): 0.05 for p in model.parameters()}
    for step in (0, 1, 2, 9):
        monkeypatch.setenv("REPULSIVE_KERNELS", "triton")
        gradients(model, seed=step)
        update.run(StepInputs(rule, step, rates))
        found = [p.grad.float() for p in model.parameters()]
        monkeypatch.setenv("REPULSIVE_KERNELS", "eager")
        gradients(model, seed=step)
        Update(model.layouts, seed=7).run(StepInputs(rule, step, rates))
        assert error(found, [p.grad.float() for p in model.parameters()]) < 3e-6


@pytest.mark.parametrize("choice", ["eager", "triton"])
def test_noise_times_the_median_of_a_group(choice, monkeypatch):
    """The median is over all slices of a group, as in `rule.gradient`."""
    torch.manual_seed(0)
    model = Weights(4, 4, 24, torch.float32)
    gradients(model)
    parts = model.joined[0].slices
    median = torch.cat([part.take(part.parameter().grad).flatten() for part in parts]).double().abs().median()
    kinds = (0, "langevin"), (1e4, "langevin"), (1e4, "released")
    rules = [SPOS(0.1, 1.0, 1e8, temperature=temperature, noise=noise) for temperature, noise in kinds]
    plain, langevin, released = (run(model, model.joined, rule, monkeypatch, choice)[0][1].double() for rule in rules)
    assert (langevin - plain).std() > 0.01
    assert torch.allclose(released - plain, median * (langevin - plain), atol=1e-6)


def test_training_through_the_handle(monkeypatch):
    """repel() itself, with gradients that move in memory at every step."""
    ends = []
    for choice in ("eager", "triton"):
        monkeypatch.setenv("REPULSIVE_KERNELS", choice)
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(16, 4, 16, dropout=0.0, batch_first=True).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rule = SPOS(0.1, 1.0, 1e6)
        handle = repel(model, optimizer, rule, measure_every=2, noise_in="gradient", verbose=False)
        x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            optimizer.step()
        ends.append((model.self_attn.in_proj_weight.detach(), handle.report()[0].ratio))
    assert torch.allclose(ends[0][0], ends[1][0], rtol=1e-4, atol=1e-6)
    assert math.isclose(ends[0][1], ends[1][1], rel_tol=1e-3)


def test_weights_and_gradients_move_between_steps(monkeypatch):
    """A replaced parameter, moved gradients, one with other strides, one missing, and back again."""
    torch.manual_seed(0)
    model = Weights(4, 4, 24, torch.float32)
    monkeypatch.setenv("REPULSIVE_KERNELS", "triton")
    update = Update(model.layouts, seed=7)
    was_fused = []
    for step in range(5):
        gradients(model, seed=step)
        if step == 1:
            model.packed = nn.Parameter(model.packed.detach() + 0.5)
            model.packed.grad = torch.ones_like(model.packed)
        if step == 2:
            model.packed.grad = model.packed.grad.T.contiguous().T  # the same numbers, column by column
        if step == 3:
            model.strided.grad = None
        was_fused.append(all(one.refresh() for one in update._fused or update._make_fused()))
        if step == 3:
            continue  # `repel` uses an update of the other groups then
        start = [p.grad.clone() for p in model.parameters()]
        update.run(StepInputs(SVGD(alpha=1.0), step))
        found = [p.grad.clone() for p in model.parameters()]
        for parameter, grad in zip(model.parameters(), start, strict=True):
            parameter.grad = grad.contiguous()
        monkeypatch.setenv("REPULSIVE_KERNELS", "eager")
        Update(model.layouts, seed=7).run(StepInputs(SVGD(alpha=1.0), step))
        monkeypatch.setenv("REPULSIVE_KERNELS", "triton")
        assert error(found, [p.grad for p in model.parameters()]) < 3e-6
    assert was_fused == [True, True, False, False, True]
