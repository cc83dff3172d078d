"""Choose where the noise of a rule enters (`noise_in`), and refuse optimizers whose steps it cannot follow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from repulsive.errors import OptimizerError, RuleError
from repulsive.heads.layout import HeadGroup
from repulsive.particles.rule import Rule
from repulsive.repulsion.optimizer_noise import RESPONSES, response_of
from repulsive.repulsion.settings import NoisePlace
from repulsive.repulsion.trained_groups import entries_with_heads

SHORT_WINDOW = 100  # steps; RMSprop averages squared gradients over so many by default

# Wrappers that leave the steps of the optimizer inside as they are, by package.
_PLAIN_WRAPPERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")

# Why the steps of an optimizer are unknown, by a word in the name of its class.
_REASONS = {
    "muon": "it orthogonalises its updates",
    "lion": "it takes the sign of its momentum, which discards the size of noise",
    "shampoo": "it multiplies gradients by matrices",
    "schedulefree": "gradients belong to an average of its iterates",
    "adafactor": "it rescales each update by its root mean square",
    "adagrad": "its steps decay to zero by themselves, so that samples stop moving",
}


def choose_noise_place(place: NoisePlace, rule: Rule | None, chain: Sequence[Any]) -> NoisePlace:
    """Resolve `noise_in="auto"`, and check that the noise can follow the optimizer's step if it has to.

    Args:
        place: the argument `noise_in` of `repel`.
        rule: the rule.
        chain: the optimizer that the user passed, and those that it wraps; the last one is a torch optimizer.

    Returns:
        "gradient", "parameter" or "optimizer". "auto" is "optimizer" for Langevin noise. It is "gradient" for other
        noise, whose size is not that of a sampler, and without noise.

    Raises:
        OptimizerError: the steps of the optimizer are not known, or have no finite sum.
        RuleError: the noise of the rule is not Langevin noise, and `place` is "optimizer".
    """
    if rule is None or not rule.has_noise or (place == "auto" and not _is_langevin(rule)):
        return "gradient" if place == "auto" else place
    if place in ("gradient", "parameter"):
        return place
    inner = chain[-1]
    for outer in chain[:-1]:
        if type(outer).__module__.partition(".")[0] not in _PLAIN_WRAPPERS:
            name = type(outer).__name__
            reason = f"it wraps {type(inner).__name__}, and may change its steps"
            raise _refusal(name, f"{reason}. If it does not, pass the wrapped optimizer to repel")
    check_noise(rule, inner)
    return "optimizer"


def check_noise(rule: Rule, optimizer: Optimizer) -> None:
    """Check that noise can follow the steps of an optimizer.

    Raises:
        OptimizerError: the steps of the optimizer are not known, or have no finite sum.
        RuleError: the noise of the rule is not Langevin noise.
    """
    if not _is_langevin(rule):
        raise RuleError(
            f"noise_in='optimizer' needs noise proportional to 1 / sqrt(lr), as Langevin noise is; the noise_scale of "
            f"{type(rule).__name__} is not, so leave noise_in out"
        )
    if response_of(optimizer) is None:
        name = type(optimizer).__name__
        names = [kind.__name__.lower() for kind in type(optimizer).__mro__]
        known = [reason for kind in names for word, reason in _REASONS.items() if word in kind]
        own = "it has a step method of its own" if isinstance(optimizer, tuple(RESPONSES)) else ""
        raise _refusal(name, next(iter(known), own or "its steps are not known here"))
    for entry in optimizer.param_groups:
        if not (entry.get("momentum", 0.0) < 1 and entry.get("dampening", 0.0) < 1):
            raise OptimizerError(
                "noise that follows the optimizer's step needs momentum and dampening below 1, got "
                f"momentum={entry.get('momentum', 0.0)!r}, dampening={entry.get('dampening', 0.0)!r}"
            )


def _refusal(name: str, reason: str) -> OptimizerError:
    return OptimizerError(
        f"noise that follows the optimizer's step does not support {name}: {reason}. Train the heads with one of "
        f"{', '.join(kind.__name__ for kind in RESPONSES)}, or choose a rule without noise. noise_in='gradient' and "
        f"noise_in='parameter' run under any optimizer, but under {name} they do not sample the distribution of the "
        "rule"
    )


def window_warning(place: NoisePlace, rule: Rule | None, groups: Sequence[HeadGroup], optimizer: Optimizer) -> str:
    """Return a warning if the second moment of the heads averages over too few steps for noise; else "".

    Args:
        place: the result of `choose_noise_place`.
        rule: the rule.
        groups: the heads that the rule acts on.
        optimizer: the torch optimizer itself, not a wrapper.
    """
    if place != "optimizer" or rule is None or not rule.has_noise or isinstance(optimizer, torch.optim.SGD):
        return ""
    entries = entries_with_heads(optimizer, groups)
    name = "alpha" if isinstance(optimizer, torch.optim.RMSprop) else "beta2"
    decay = min(float(entry["alpha"] if name == "alpha" else entry["betas"][1]) for entry in entries)
    window = round(1 / (1 - decay))
    if window > SHORT_WINDOW:
        return ""
    return (
        f"the second moment of {type(optimizer).__name__} averages over {window} steps ({name}={decay:g}). It then "
        "follows the weights, and samples vary too much: with 100 steps and full gradients their variance was measured "
        f"as 1.1 to 1.9 times that of the target. Choose {name}=0.999 or larger, or call "
        "repulsive.repulsion.fix_second_moment(optimizer) before you take samples"
    )


def _is_langevin(rule: Rule) -> bool:
    """Check whether noise is proportional to 1 / sqrt(lr), and does not depend on gradients."""
    return not rule.scales_noise and math.isclose(2 * rule.noise_scale(4.0), rule.noise_scale(1.0), rel_tol=1e-6)
