"""The Triton kernels on a GPU: synchronisation, CUDA graphs, fused optimizers, compiled steps and memory."""

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
from repulsive import SGLD, SPOS, SVGD, CosineLadder, repel
from repulsive.particles import KernelFree
from repulsive.repulsion.backends.choose import Update
from repulsive.repulsion.backends.inputs import StepInputs
from tests.repulsion.fused_weights import (
    DEVICE,
    RAMP,
    Weights,
    error,
    few_programs,  # noqa: F401  an autouse fixture
    gradients,
)


@pytest.mark.gpu
def test_no_host_synchronisation(monkeypatch):
    monkeypatch.setenv("REPULSIVE_KERNELS", "triton")
    model = Weights(4, 16, 64, torch.float32)
    update, rates = Update(model.groups, seed=0), {id(p): 0.05 for p in model.parameters()}
    for rule in (SVGD(), SVGD(alpha="auto"), SPOS(), SVGD(kernel="cosine"), CosineLadder(), SGLD(), KernelFree()):
        gradients(model)
        update.run(StepInputs(rule, 0, rates))  # compiles
        update.run(StepInputs(rule, 1, rates, measure=True))
        gradients(model, 2)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            update.run(StepInputs(rule, 2, rates, measure=True))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_inside_a_captured_graph(monkeypatch):
    """Replays of a captured update: right numbers for SVGD, fresh noise for SPOS."""
    monkeypatch.setenv("REPULSIVE_KERNELS", "triton")
    torch.manual_seed(0)
    model = Weights(4, 16, 64, torch.float32)
    gradients(model)
    start = [p.grad.clone() for p in model.parameters()]
    reset = lambda: [p.grad.copy_(g) for p, g in zip(model.parameters(), start, strict=True)]  # noqa: E731
    for rule in (SVGD(alpha=1.0), SPOS(0.1, 1.0, 10.0), SVGD(alpha="auto", space="sphere"), SGLD(0.1, 0.5)):
        update, rates = Update(model.groups, seed=0), {id(p): 0.05 for p in model.parameters()}
        update.run(StepInputs(rule, 0, rates))
        expected = []
        for step in (1, 2, 3):
            reset()
            update.run(StepInputs(rule, step, rates))
            expected.append([p.grad.clone() for p in model.parameters()])
        fresh = Update(model.groups, seed=0)
        reset()
        fresh.run(StepInputs(rule, 0, rates))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fresh.run(StepInputs(rule, 1, rates))
        for numbers in expected:
            reset()
            graph.replay()
            assert error([p.grad for p in model.parameters()], numbers) < 1e-6


@pytest.mark.gpu
def test_replays_follow_moving_gradients(monkeypatch):
    """From the third call on, the launches are one graph; weights and gradients may move at every call."""
    torch.manual_seed(0)
    model = Weights(4, 16, 64, torch.float32)
    monkeypatch.setenv("REPULSIVE_KERNELS", "triton")
    update, kept = Update(model.groups, seed=7), []
    for step in range(1, 6):
        gradients(model, seed=step)
        kept.append([p.grad for p in model.parameters()])  # kept, so that the next ones get other addresses
        start = [g.clone() for g in kept[-1]]
        update.run(StepInputs(RAMP, step))
        found = [p.grad.clone() for p in model.parameters()]
        for parameter, grad in zip(model.parameters(), start, strict=True):
            parameter.grad = grad
        monkeypatch.setenv("REPULSIVE_KERNELS", "eager")
        Update(model.groups, seed=7).run(StepInputs(RAMP, step))
        monkeypatch.setenv("REPULSIVE_KERNELS", "triton")
        assert error(found, [p.grad for p in model.parameters()]) < 3e-6


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False])
def test_fused_adam_and_gradient_scaler(fused):
    ends = []
    for scaled in (False, True):
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True).to(DEVICE)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused)
        handle = repel(model, optimizer, SVGD(alpha=1.0), verbose=False)
        scaler = torch.amp.GradScaler(enabled=scaled, init_scale=256.0)
        x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        for index in range(5):
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            if scaled and index == 1:
                model.linear1.weight.grad[0, 0] = torch.inf
            if scaled or index != 1:
                scaler.step(optimizer)
            scaler.update()
        assert handle.steps == 4
        ends.append(model.self_attn.in_proj_weight.detach())
    assert torch.allclose(ends[0], ends[1], rtol=1e-3, atol=2e-5)


@pytest.mark.gpu
def test_a_compiled_training_step():
    model = nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = repel(torch.compile(model), optimizer, SVGD(), verbose=False)
    compiled = torch.compile(model)
    x = torch.randn(3, 5, 64, device=DEVICE)

    @torch.compile
    def step():
        optimizer.zero_grad()
        compiled(x).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    assert handle.steps == 3


@pytest.mark.gpu
def test_extra_memory_is_small(monkeypatch):
    monkeypatch.setenv("REPULSIVE_KERNELS", "triton")
    model = Weights(4, 128, 512, torch.float32)
    gradients(model)
    update = Update(model.groups, seed=0)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for step in range(3):
        update.run(StepInputs(SVGD(), step, measure=step == 1))
    particles = sum(group.num_heads * group.dim * 4 for group in model.groups)
    assert torch.cuda.max_memory_allocated() - before <= 0.02 * particles
