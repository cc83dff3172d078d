"""From a recipe's tables to what torch and `repel` take: rules, optimisers, learning rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from repulsive import SGLD, SPOS, SVGD, Handle, repel
from repulsive.particles.ladder import CosineLadder
from repulsive.particles.priors import Gaussian
from repulsive.particles.rule import Rule
from repulsive.repulsion.schedules import Cosine, Linear, WarmUp
from repulsive.training.recipe import Method, Optimizer, Recipe

_SHARED = ("stepsize", "kernel", "bandwidth", "smoothing", "space")


def make_rule(method: Method, num_data: int, total_steps: int) -> Rule | None:
    """The rule a recipe asks for; None for plain training.

    Args:
        method: the recipe's table.
        num_data: training items, for temperature = "data" and the prior.
        total_steps: steps of the whole training, for schedules.

    Raises:
        RuleError: a setting is out of range.
    """
    temperature = 1 / num_data if method.temperature == "data" else float(method.temperature)
    if method.rule == "none":
        return None
    if method.rule == "sgld":
        return SGLD(method.stepsize, temperature)
    if method.rule == "cosine":
        return CosineLadder(method.stepsize, _scheduled(method, total_steps)["alpha"], rung=method.rung)
    settings = {name: getattr(method, name) for name in _SHARED} | _scheduled(method, total_steps)
    if method.prior == "gaussian":
        settings["prior"] = Gaussian(method.prior_std, num_data)
    if method.rule == "svgd":
        return SVGD(**settings)
    return SPOS(**settings, beta=method.beta, temperature=temperature, noise=method.noise)


def _scheduled(method: Method, steps: int) -> dict[str, Any]:
    """Alpha and ratio, one of them as a schedule if the recipe asks for it."""
    found: dict[str, Any] = {"alpha": method.alpha, "ratio": method.ratio}
    name = "ratio" if method.alpha == "auto" else "alpha"
    value = float(found[name])
    schedules: dict[str, Callable[[], Any]] = {
        "constant": lambda: found[name],
        "linear": lambda: Linear(value, 0.0, steps),
        "cosine": lambda: Cosine(value, 0.0, steps),
        "warmup": lambda: WarmUp(max(1, steps // 10), value),
    }
    return found | {name: schedules[method.schedule]()}


def attach(model: nn.Module, optimizer: Any, recipe: Recipe, num_data: int, total_steps: int) -> Handle:
    """`repel` as the recipe says; plain training gets a handle too, which clips and measures."""
    method = recipe.method
    return repel(
        model,
        optimizer,
        make_rule(method, num_data, total_steps),
        layers=method.layers,
        parts=method.parts,
        where=method.where,
        particle=method.particle,
        layout=method.layout,
        order=method.order,
        max_norm=recipe.optimizer.clip or None,
        noise_in=method.noise_in,
        seed=recipe.seed,
        measure_every=recipe.training.log_every,
        verbose=False,
    )


def make_optimizer(settings: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """A torch optimiser over all parameters that are trained; fused on a GPU where torch has that."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    fused: dict[str, Any] = {"fused": True} if parameters[0].is_cuda else {}
    rate: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    if settings.name == "sgd":
        return torch.optim.SGD(parameters, momentum=settings.momentum, **rate, **fused)
    if settings.name == "adagrad":
        return torch.optim.Adagrad(parameters, eps=settings.eps, **rate)
    kind = torch.optim.Adam if settings.name == "adam" else torch.optim.AdamW
    return kind(parameters, betas=settings.betas, eps=settings.eps, **rate, **fused)


def rate_at(step: int, settings: Optimizer, total: int) -> float:
    """The learning rate of a step, counted from 0: a function of the step alone, so that nothing need be saved."""
    rise = min(1.0, (step + 1) / settings.warmup) if settings.warmup else 1.0
    after, span = max(0, step - settings.warmup), max(1, total - settings.warmup)
    if settings.schedule == "linear":
        fall = max(0.0, 1 - after / span)
    elif settings.schedule == "cosine":
        fall = Cosine(1.0, 0.0, span)(after)
    elif settings.schedule == "inverse-sqrt":
        fall = (max(1, settings.warmup) / max(1, settings.warmup, step + 1)) ** 0.5
    else:
        fall = 1.0
    return settings.lr * rise * fall
