"""Make the rule, the optimizer and the learning rates of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from repulsive import SGLD, SPOS, SVGD, Handle, find_heads, repel
from repulsive.errors import RuleError
from repulsive.lab.engine.recipe import Method, Optimizer, Recipe
from repulsive.particles.kernel_free import KernelFree
from repulsive.particles.ladder import CosineLadder
from repulsive.particles.priors import Gaussian
from repulsive.particles.rule import Rule
from repulsive.particles.schedules import Cosine, Linear, Until, WarmUp

CYCLES = {"cycle-4": 4, "cycle-5": 5}  # epochs per cycle; the rate falls by a fifth each epoch
_SHARED = ("stepsize", "kernel", "bandwidth", "smoothing", "space", "act_every")
_NOT_OF_SGLD = ("kernel", "bandwidth", "smoothing", "space", "act_every", "schedule", "until")


def make_rule(method: Method, num_data: int, total_steps: int) -> Rule | None:
    """Make the rule of a recipe; None for plain training.

    Args:
        method: the recipe's `[method]` table.
        num_data: number of training items, for the value "data" of `temperature` and `alpha`, and for the prior.
        total_steps: steps of the whole training, for schedules.

    Raises:
        RuleError: a setting is out of range, or the rule does not have it.
    """
    temperature = 1 / num_data if method.temperature == "data" else float(method.temperature)
    if method.alpha == "data":
        method = replace(method, alpha=1 / num_data)
    if method.rule == "none":
        return None
    prior = {"prior": Gaussian(method.prior_std, num_data)} if method.prior == "gaussian" else {}
    if method.rule == "sgld":
        if unused := [name for name in _NOT_OF_SGLD if getattr(method, name) != getattr(Method, name)]:
            raise RuleError(f"SGLD has no {' and no '.join(unused)}; leave out method.{' and method.'.join(unused)}")
        return SGLD(cast(float, method.stepsize), temperature, **prior)
    settings = {name: getattr(method, name) for name in _SHARED} | _scheduled(method, total_steps) | prior
    if method.rule == "cosine":
        if method.smoothing == Method.smoothing:
            del settings["smoothing"]  # the rung decides
        return CosineLadder(**settings, rung=method.rung)
    if method.rule == "svgd":
        return SVGD(**settings)
    if method.rule == "kernel-free":
        return KernelFree(**settings)
    return SPOS(**settings, beta=method.beta, temperature=temperature, noise=method.noise)


def _scheduled(method: Method, steps: int) -> dict[str, Any]:
    """Return the setting `alpha` and, with `alpha = "auto"`, `ratio`; the numeric one may become a schedule."""
    settings: dict[str, Any] = {"alpha": method.alpha}
    if method.alpha == "auto":
        settings["ratio"] = method.ratio
    name = "ratio" if method.alpha == "auto" else "alpha"
    value = float(settings[name])
    schedules: dict[str, Callable[[], Any]] = {
        "constant": lambda: Until(method.until, value) if method.until else settings[name],
        "linear": lambda: Linear(value, 0.0, steps),
        "cosine": lambda: Cosine(value, 0.0, steps),
        "warmup": lambda: WarmUp(max(1, steps // 10), value),
    }
    return settings | {name: schedules[method.schedule]()}


def attach(model: nn.Module, optimizer: Any, recipe: Recipe, rule: Rule | None) -> Handle:
    """Call `repel` with the settings of a recipe; for plain training the handle only clips and measures.

    Args:
        model: the model whose heads repel.
        optimizer: its optimizer.
        recipe: the recipe.
        rule: the result of `make_rule`.
    """
    method = recipe.method
    names = ("layers", "parts", "where", "particle", "layout")
    selection: dict[str, Any] = {name: getattr(method, name) for name in names}
    groups = find_heads(model, **selection)
    if all(group.num_heads == 1 for group in groups):  # `repel` refuses one head unless its groups are given
        selection = {"groups": groups}
    return repel(
        model,
        optimizer,
        rule,
        **selection,
        order=method.order if recipe.optimizer.clip else "clip-repel",
        max_norm=recipe.optimizer.clip or None,
        noise_in=method.noise_in,
        seed=recipe.seed,
        measure_every=recipe.training.log_every,
        verbose=False,
    )


def make_optimizer(
    settings: Optimizer, model: nn.Module, factors: Mapping[str, float] | None = None
) -> torch.optim.Optimizer:
    """Make a torch optimizer for all trainable parameters, fused on a GPU where torch supports it.

    Args:
        settings: the recipe's `[optimizer]` table.
        model: the model to train.
        factors: parameter name -> factor of its learning rate; 1 for other parameters. Parameters with the same factor
            form a param group, which stores it as `factor`.

    Raises:
        ValueError: a factor is not positive, or its name is not a parameter.
    """
    parameters = _groups(model, factors or {}, settings)
    fused: dict[str, Any] = {"fused": True} if next(model.parameters()).is_cuda else {}
    rate: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    if settings.name == "sgd":
        return torch.optim.SGD(parameters, momentum=settings.momentum, **rate, **fused)
    if settings.name == "adagrad":
        return torch.optim.Adagrad(parameters, eps=settings.eps, **rate)
    kind = torch.optim.Adam if settings.name == "adam" else torch.optim.AdamW
    return kind(parameters, betas=settings.betas, eps=settings.eps, **rate, **fused)


def _groups(model: nn.Module, factors: Mapping[str, float], settings: Optimizer) -> Any:
    """Return the trainable parameters: a list, or param groups with one factor and one weight decay each, in order."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not factors and settings.decay == "all":
        return list(trained.values())
    if unknown := factors.keys() - dict(model.named_parameters()).keys():
        raise ValueError(f"factors for {', '.join(sorted(unknown)[:3])}: the model has no such parameter")
    if wrong := [name for name, factor in factors.items() if not 0 < factor < float("inf")]:
        raise ValueError(f"the factor of {wrong[0]} is {factors[wrong[0]]}; it must be positive")
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in trained.items():
        decays = settings.decay == "all" or parameter.ndim > 1
        key = float(factors.get(name, 1.0)), settings.weight_decay if decays else 0.0
        groups.setdefault(key, []).append(parameter)
    return [
        {"params": members, "factor": factor, "weight_decay": decay, "decay": decay}
        for (factor, decay), members in groups.items()
    ]


def set_rate(optimizer: Any, rate: float) -> None:
    """Set the learning rate of every param group to `rate` times its factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("factor", 1.0)


def undo_correction(optimizer: Any, settings: Optimizer, step: int) -> None:
    """Undo the bias correction of torch's Adam and AdamW for the next step; call it after `set_rate`.

    Without bias correction a step is θ -= lr m / (√v + eps). With c1 = 1 - β1^t and c2 = 1 - β2^t torch's step is
    lr (m / c1) / (√(v / c2) + eps), which is the same for the learning rate lr c1 / √c2 and eps / √c2. Torch multiplies
    the weight decay of AdamW by the learning rate, so it is divided by c1 / √c2.

    Args:
        optimizer: Adam or AdamW.
        settings: the recipe's `[optimizer]` table.
        step: number of the step, from 0.
    """
    first, second = (1 - beta ** (step + 1) for beta in settings.betas)
    factor = first / second**0.5
    for group in optimizer.param_groups:
        group["lr"] *= factor
        group["eps"] = settings.eps / second**0.5
        if settings.name == "adamw":
            group["weight_decay"] = group.get("decay", settings.weight_decay) / factor


def rate_at(step: int, settings: Optimizer, total: int, epoch: int = 0) -> float:
    """Compute the learning rate of a step. It depends on the step only, so checkpoints need no scheduler state.

    Args:
        step: number of the step, from 0.
        settings: the recipe's `[optimizer]` table.
        total: steps of the whole training.
        epoch: number of the step's epoch, from 0; used by cyclic schedules.
    """
    warmup = settings.warmup or round(settings.warmup_share * total)
    rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
    after, span = max(0, step - warmup), max(1, total - warmup)
    if settings.schedule == "linear":
        fall = max(settings.final, 1 - (1 - settings.final) * after / span)
    elif settings.schedule == "linear-throughout":
        fall = max(0.0, 1 - step / max(1, total))
    elif settings.schedule == "cosine":
        fall = Cosine(1.0, settings.final, span)(after)
    elif settings.schedule == "inverse-sqrt":
        fall = (max(1, warmup) / max(1, warmup, step + 1)) ** 0.5
    elif settings.schedule in CYCLES:
        fall = 1 - epoch % CYCLES[settings.schedule] / 5
    else:
        fall = 1.0
    return settings.lr * rise * fall
