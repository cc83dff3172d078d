"""Steps like the one before are replayed: training stays the same when weights, gradients or rules change."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from repulsive import SPOS, SVGD, repel
from repulsive.repulsion.backends import fused
from repulsive.repulsion.backends.choose import Update

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Without a GPU, use a graph that calls what a GPU would replay."""
    monkeypatch.setenv("REPULSIVE_KERNELS", "triton")
    if GPU:
        return
    monkeypatch.setattr(fused, "SPLITS", 2)

    def run(self, launch, key, device):
        self._graphs[key] = SimpleNamespace(replay=launch)
        launch()

    monkeypatch.setattr(fused._GraphCache, "run", run)


@pytest.fixture
def whole(monkeypatch):
    """Record the steps that were not replayed."""
    steps = []
    run = Update.run
    monkeypatch.setattr(Update, "run", lambda self, *a, step, **k: steps.append(step) or run(self, *a, step=step, **k))
    return steps


def train(rule, change=lambda step, model, optimizer, handle: None, steps=9, still=False, **settings):
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 4, 8, dropout=0.0, batch_first=True).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    handle = repel(model, optimizer, rule, verbose=False, **({"measure_every": 6} | settings))
    x, held = torch.randn(2, 3, 16).to(DEVICE), []
    for step in range(steps):
        if not still:
            held.append([p.grad for p in model.parameters()])  # so that the next ones get other addresses
        optimizer.zero_grad(set_to_none=not still)
        model(x).square().mean().backward()
        change(step, model, optimizer, handle)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()], handle


def same(found, expected):
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) < 2e-6


def eagerly(monkeypatch, *given, **settings):
    with monkeypatch.context() as patch:
        patch.setenv("REPULSIVE_KERNELS", "eager")
        return train(*given, **settings)[0]


def test_most_steps_are_replayed(monkeypatch, whole):
    found, handle = train(SVGD(alpha=1.0), still=True, steps=14)
    assert handle.steps == 14
    assert whole == [0, 1, *([2] if GPU else []), 6, 7, 12, 13]  # measured at 0, 6 and 12; captured at 2
    assert same(found, eagerly(monkeypatch, SVGD(alpha=1.0), still=True, steps=14))


@pytest.mark.parametrize(
    ("rule", "settings"),
    [
        (SVGD(alpha=lambda step: 0.1 * step), {}),
        (SPOS(0.1, 1.0, 10.0), {}),
        (SVGD(alpha=1.0), {"max_norm": 0.5}),
    ],
    ids=["schedule", "noise", "clipping"],
)
def test_steps_that_differ_are_not_replayed(rule, settings, monkeypatch, whole):
    found, _ = train(rule, **settings)
    assert whole == list(range(9))
    assert same(found, eagerly(monkeypatch, rule, **settings))


def another_rule(step, model, optimizer, handle):
    if step == 4:
        handle.rule = SVGD(alpha=0.3)


def no_gradient(step, model, optimizer, handle):
    if step == 4:
        model.self_attn.in_proj_weight.grad = None


def another_weight(step, model, optimizer, handle):
    """Replace a weight in the layer and in the optimizer; the old one keeps its gradient."""
    if step == 4:
        old = model.self_attn.in_proj_weight
        model.self_attn.in_proj_weight = new = nn.Parameter(old.detach() * 0.5)
        new.grad = old.grad.clone()
        optimizer.param_groups[0]["params"] = [new if p is old else p for p in optimizer.param_groups[0]["params"]]


def moved_weight(step, model, optimizer, handle):
    if step == 4:
        weight = model.self_attn.in_proj_weight
        weight.data = weight.data * 0.5


def frozen_weight(step, model, optimizer, handle):
    """Its gradient is kept as zeros, and repulsion must not change it."""
    weight = model.self_attn.in_proj_weight.requires_grad_(step != 4)
    if step == 4:
        weight.grad.zero_()


@pytest.mark.parametrize("change", [another_rule, no_gradient, another_weight, moved_weight, frozen_weight])
@pytest.mark.parametrize("still", [False, True])
def test_changes_take_effect(change, still, monkeypatch):
    found, _ = train(SVGD(alpha=1.0), change, still=still)
    assert same(found, eagerly(monkeypatch, SVGD(alpha=1.0), change, still=still))
