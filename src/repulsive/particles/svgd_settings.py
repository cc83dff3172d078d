"""Check the settings of `SVGD`: their ranges, and which of them go together."""

from __future__ import annotations

from typing import Any, Literal, get_args

from repulsive.errors import RuleError, did_you_mean
from repulsive.particles import kernels, priors
from repulsive.particles.kernels import Cosine, Differentiable, Hinge
from repulsive.particles.rule import check_number

TOKENS, EVERY = 1024, "auto"  # defaults with space="logits"
CircuitsName = Literal["qk", "qk+ov"]
CIRCUITS: tuple[str, ...] = get_args(CircuitsName)


class Unset(float):
    """The default value of a setting, distinguishable from the same number given by the user."""


def check_settings(rule: Any) -> None:
    """Check all settings of a rule of class `SVGD` or a subclass.

    Raises:
        RuleError: a setting is out of range or unknown, or has no effect with the others.
    """
    _check_stepsize(rule)
    _check_space(rule)
    _check_logit_settings(rule)
    check_number(rule, "smoothing", least=0)
    if rule.smoothing > 1:
        raise RuleError(f"{_name(rule)}(smoothing={rule.smoothing!r}): must be between 0 and 1")
    _check_weight(rule)
    if rule.bandwidth != "paper" and isinstance(kernels.resolve(rule.kernel), Cosine | Hinge | Differentiable):
        raise RuleError(
            f"{_name(rule)}(kernel={rule.kernel!r}, bandwidth={rule.bandwidth!r}): this kernel has no "
            "bandwidth; leave bandwidth out, or choose kernel='rbf' or 'imq'"
        )
    priors.resolve(rule.prior)
    _check_act_every(rule)


def _check_stepsize(rule: Any) -> None:
    if not isinstance(rule.stepsize, str):
        check_number(rule, "stepsize", above=0)
    elif rule.stepsize != "heads":
        raise RuleError(f"{_name(rule)}(stepsize={rule.stepsize!r}): must be a number or 'heads'")


def _check_space(rule: Any) -> None:
    """Check what can be compared in the rule's space: the kernel, the smoothing and the prior."""
    if rule.space not in kernels.SPACES:
        hint = did_you_mean(rule.space, kernels.SPACES)
        raise RuleError(f"{_name(rule)}(space={rule.space!r}): {hint}choose one of {kernels.SPACES}")
    kernel = kernels.resolve(rule.kernel)
    if isinstance(kernel, Hinge) and (rule.space == "weights" or rule.smoothing != 0):
        raise RuleError(
            f"{_name(rule)}(kernel='hinge', space={rule.space!r}, smoothing={rule.smoothing!r}): this kernel "
            "compares directions and does not average gradients; choose space='sphere' or 'logits', and "
            "smoothing=0"
        )
    if not rule.reads_tokens:
        return
    if rule.smoothing != 0:
        raise RuleError(
            f"{_name(rule)}(space='logits', smoothing={rule.smoothing!r}): must be 0, as gradients of weights "
            "cannot be averaged by the similarity of logits"
        )
    if priors.resolve(rule.prior).precision:
        raise RuleError(f"{_name(rule)}(space='logits', prior={rule.prior!r}): only a uniform prior is supported")
    if isinstance(kernel, Differentiable):
        raise RuleError(f"{_name(rule)}(space='logits'): choose a kernel by name: 'rbf', 'imq', 'cosine' or 'hinge'")


def _check_logit_settings(rule: Any) -> None:
    """Check the settings that only `space="logits"` has."""
    for setting, default in (("tokens", TOKENS), ("every", EVERY)):
        value = getattr(rule, setting)
        if value == default and isinstance(value, str):
            continue
        _check_count(rule, setting)
        if value != default and not rule.reads_tokens:
            raise RuleError(f"{_name(rule)}({setting}={value!r}): only space='logits' has this setting")
    if rule.tokens < 2:
        raise RuleError(f"{_name(rule)}(tokens={rule.tokens}): logits are compared between tokens, so at least 2")
    if rule.circuits not in CIRCUITS:
        raise RuleError(f"{_name(rule)}(circuits={rule.circuits!r}): choose one of {CIRCUITS}")
    if rule.circuits != CIRCUITS[0] and not rule.reads_tokens:
        raise RuleError(f"{_name(rule)}(circuits={rule.circuits!r}): only space='logits' has this setting")


def _check_weight(rule: Any) -> None:
    """Check alpha, and that a ratio is given only with alpha="auto"."""
    name, alpha, ratio = _name(rule), rule.alpha, rule.ratio
    for setting, value in (("alpha", alpha), ("ratio", ratio)):
        if isinstance(value, type):
            kind = value.__name__
            raise RuleError(
                f"{name}({setting}={kind}): expected a number or a schedule, got a class; write {kind}(...)"
            )
    if isinstance(alpha, str):
        if alpha != "auto":
            raise RuleError(f"{name}(alpha={alpha!r}): must be a number, a schedule or 'auto'")
    elif not callable(alpha):
        check_number(rule, "alpha", least=0)
    if not callable(ratio):
        check_number(rule, "ratio", least=0)
    if alpha != "auto" and not isinstance(ratio, Unset):
        raise RuleError(
            f"{name}(alpha={alpha!r}, ratio={ratio!r}): ratio is the target of alpha='auto', and "
            f"has no effect without it; write {name}(alpha='auto', ratio={ratio!r})"
        )


def _check_act_every(rule: Any) -> None:
    _check_count(rule, "act_every")
    if rule.act_every > 1 and not rule.only_adds_repulsion:
        raise RuleError(
            f"{_name(rule)}(act_every={rule.act_every}): the other steps use the gradients as they are, so this rule "
            "may only add repulsion to them; choose stepsize='heads', smoothing=0 and prior='uniform'"
        )
    if isinstance(rule.every, int) and rule.every > 1 and rule.every % rule.act_every:
        raise RuleError(
            f"{_name(rule)}(every={rule.every}, act_every={rule.act_every}): forces are computed in steps that act; "
            f"choose a multiple of {rule.act_every} for every, or leave one of them out"
        )


def _check_count(rule: Any, setting: str) -> None:
    value = getattr(rule, setting)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RuleError(f"{_name(rule)}({setting}={value!r}): must be a whole number, at least 1")


def _name(rule: Any) -> str:
    return type(rule).__name__
