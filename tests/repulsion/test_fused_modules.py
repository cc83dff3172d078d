"""Particles in separate modules on the fused backend: gradients are those of the eager backend."""

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from repulsive import SGLD, SPOS, SVGD, group_modules, repel
from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.repulsion.backends import launch_settings
from repulsive.repulsion.backends.choose import Update
from repulsive.repulsion.backends.inputs import StepInputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPHERE = SVGD("heads", alpha="auto", ratio=0.3, space="sphere", smoothing=0)
RULES = {"weights": SVGD(alpha=1.0), "sphere": SPHERE, "noise": SPOS(0.1, 1.0, 10.0), "sgld": SGLD(0.1, 0.5)}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    monkeypatch.setattr(launch_settings, "SPLITS", 2)  # the interpreter is slow


def make_experts(count, out=4, width=6):
    torch.manual_seed(0)
    return nn.ModuleList(nn.Sequential(nn.Linear(width, out), nn.Linear(out, 3)) for _ in range(count)).to(DEVICE)


def gradients(experts, missing=()):
    source = torch.Generator().manual_seed(1)
    for name, parameter in experts.named_parameters():
        values = torch.randn(parameter.shape, generator=source).to(DEVICE)
        parameter.grad = None if int(name.split(".")[0]) in missing else values


def run(experts, groups, rule, monkeypatch, kernels, rates=None, missing=(), step=3):
    """Update once; return the gradients, and the update."""
    monkeypatch.setenv("REPULSIVE_KERNELS", kernels)
    gradients(experts, missing)
    update = Update(groups, seed=7)
    update.run(StepInputs(rule, step, {id(p): 0.05 for p in experts.parameters()} if rates is None else rates))
    return [None if p.grad is None else p.grad.clone() for p in experts.parameters()], update


def same(found, expected):
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if a is not None or b is not None]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs) < 3e-6


@pytest.mark.parametrize(
    ("name", "count", "particle"),
    [("weights", 2, "module"), ("sphere", 5, "parameter"), ("noise", 12, "module"), ("sgld", 5, "module")],
)
def test_gradients_are_those_of_the_eager_backend(name, count, particle, monkeypatch):
    experts = make_experts(count)
    groups = group_modules(experts, particle=particle)
    expected, _ = run(experts, groups, RULES[name], monkeypatch, "eager")
    found, update = run(experts, groups, RULES[name], monkeypatch, "triton")
    assert update._was_fused and update._eager_rest is None
    assert same(found, expected)


def test_several_heads_in_each_module(monkeypatch):
    """Two heads in the weight of each of two modules make one group of four."""
    experts = make_experts(2)
    rows = torch.arange(4).view(2, 2)
    slices = tuple(HeadSlice(net[0], "weight", f"{i}.weight", rows) for i, net in enumerate(experts))
    groups = [HeadGroup("heads", 0, "q", "-", "", "test", slices, modules=2)]
    expected, _ = run(experts, groups, RULES["weights"], monkeypatch, "eager")
    found, update = run(experts, groups, RULES["weights"], monkeypatch, "triton")
    assert update._was_fused and same(found, expected)


def test_an_expert_without_gradient_stays_as_it_is(monkeypatch):
    """That step is eager, for the groups of experts alone; the next one is fused again."""
    experts = make_experts(4)
    own = HeadSlice(experts[0][1], "weight", "weight", torch.arange(3).view(3, 1))
    heads = HeadGroup("heads", 0, "q", "encoder", "", "test", (own,))
    groups = [heads, *group_modules(experts, parameters="0.weight")]
    expected, _ = run(experts, groups, SPHERE, monkeypatch, "eager", missing=(2,))
    found, update = run(experts, groups, SPHERE, monkeypatch, "triton", missing=(2,))
    assert not update._was_fused and list(update._eager_plain) == [1]
    assert found[8] is None and same(found, expected)
    gradients(experts)
    update.run(StepInputs(SPHERE, 4))
    assert update._was_fused


def test_noise_with_different_learning_rates_is_eager(monkeypatch):
    experts = make_experts(3)
    groups = group_modules(experts)
    rates = {id(p): 0.05 * (1 + int(name[0])) for name, p in experts.named_parameters()}
    expected, _ = run(experts, groups, RULES["noise"], monkeypatch, "eager", rates)
    found, update = run(experts, groups, RULES["noise"], monkeypatch, "triton", rates)
    assert not update._was_fused and same(found, expected)


def test_modules_with_other_strides_are_eager(monkeypatch):
    experts = make_experts(3)
    experts[1][0].weight = nn.Parameter(experts[1][0].weight.detach().T.contiguous().T)
    groups = group_modules(experts)
    expected, _ = run(experts, groups, RULES["weights"], monkeypatch, "eager")
    found, update = run(experts, groups, RULES["weights"], monkeypatch, "triton")
    assert update._eager_rest is not None and same(found, expected)


def test_training_and_reports_are_those_of_the_eager_backend(monkeypatch):
    weights, reports = [], []
    for kernels in ("eager", "triton"):
        monkeypatch.setenv("REPULSIVE_KERNELS", kernels)
        experts = make_experts(4)
        optimizer = torch.optim.SGD(experts.parameters(), lr=0.1)
        handle = repel(experts, optimizer, SPHERE, groups=group_modules(experts), verbose=False, measure_every=2)
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(2)).to(DEVICE)
        for _ in range(5):
            optimizer.zero_grad()
            sum(expert(x).square().mean() for expert in experts).backward()
            optimizer.step()
        weights.append([p.detach().clone() for p in experts.parameters()])
        reports.append(handle.report())
    assert same(weights[1], weights[0])
    for one, other in zip(*reports, strict=True):
        for name in ("ratio", "similarity", "largest"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-3, abs=1e-5), name
