"""Adam without bias correction, weight decay of matrices only, and a decay that overlaps with the warm-up."""

import pytest
import torch
from torch import nn

from repulsive.errors import ConfigError
from repulsive.lab.engine import config, methods
from repulsive.lab.engine.recipe import Optimizer

SETTINGS = Optimizer(
    "adamw", lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.3, decay="matrices", bias_correction=False
)


def test_steps_without_bias_correction_equal_the_formula():
    """θ -= lr (m / (√v + eps) + decay θ), as in google-research/electra's AdamWeightDecayOptimizer."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    state = {name: [torch.zeros_like(x), torch.zeros_like(x)] for name, x in (("weight", weight), ("bias", bias))}
    optimizer = methods.make_optimizer(SETTINGS, model)
    for step in range(7):
        rate = 0.1 / (step + 1)
        grads = {"weight": torch.randn_like(weight), "bias": torch.randn_like(bias)}
        for name, x, decay in (("weight", weight, 0.3), ("bias", bias, 0.0)):
            m, v = state[name]
            m.mul_(0.8).add_(0.2 * grads[name])
            v.mul_(0.9).add_(0.1 * grads[name] ** 2)
            x -= rate * (m / (v.sqrt() + 1e-3) + decay * x)
        model.weight.grad, model.bias.grad = grads["weight"], grads["bias"]
        methods.set_rate(optimizer, rate)
        methods.undo_correction(optimizer, SETTINGS, step)
        optimizer.step()
        assert torch.allclose(model.weight, weight, atol=1e-12) and torch.allclose(model.bias, bias, atol=1e-12)


def test_only_matrices_decay():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    groups = methods.make_optimizer(SETTINGS, model, {"1.weight": 0.5}).param_groups
    found = {id(p): (group["factor"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert {name: found[id(p)] for name, p in model.named_parameters()} == {
        "0.weight": (1.0, 0.3),
        "1.weight": (0.5, 0.3),
        "1.bias": (1.0, 0.0),
        "2.weight": (1.0, 0.0),
        "2.bias": (1.0, 0.0),
    }


def test_warm_up_and_decay_are_multiplied():
    settings = Optimizer(lr=8.0, schedule="linear-throughout", warmup=4)
    assert [methods.rate_at(step, settings, 8) for step in range(8)] == [2.0, 3.5, 4.5, 5.0, 4.0, 3.0, 2.0, 1.0]


def test_sgd_has_no_bias_correction():
    with pytest.raises(ConfigError, match="bias_correction=false: sgd has no bias correction"):
        config.build(Optimizer, {"name": "sgd", "bias_correction": False})
