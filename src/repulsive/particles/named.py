"""Look up rules by name, for `repel`, the callbacks and the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, cast

from repulsive.errors import RuleError, did_you_mean
from repulsive.particles.kernel_free import KernelFree
from repulsive.particles.rule import Rule
from repulsive.particles.schedules import Until
from repulsive.particles.sgld import SGLD
from repulsive.particles.spos import SPOS
from repulsive.particles.svgd import SVGD
from repulsive.plugins import RULES as GROUP
from repulsive.plugins import load_plugins

RuleName = Literal["recommended", "paper", "sphere", "svgd", "spos", "spos-paper", "sgld", "logits", "kernel-free"]
RECOMMENDED: RuleName = "recommended"  # the default of `repel` and of the callbacks
NOISE_IN_GRADIENT = ("spos-paper",)  # published rules: `repel` adds their noise to the gradient unless told otherwise


def _sphere() -> Rule:
    return SVGD("heads", alpha="auto", ratio=0.01, space="sphere", smoothing=0, act_every=4)


def _logits() -> Rule:
    """All of the effect that was measured in language models comes from the first steps of training."""
    return SVGD("heads", Until(500, 0.01), space="logits")


# Built on demand, so that an error in one rule does not affect the others.
RULES: dict[str, Callable[[], Rule]] = {
    "recommended": _sphere,
    "paper": lambda: SVGD(stepsize=0.1, alpha=0.01),
    "sphere": _sphere,
    "svgd": lambda: SVGD(),
    "spos": lambda: SPOS(),
    "spos-paper": lambda: SPOS(temperature=1.0),
    "sgld": lambda: SGLD(),
    "logits": _logits,
    "kernel-free": lambda: KernelFree(),
}


def known_rules() -> dict[str, Callable[[], Rule]]:
    """The rules in `RULES`, then those that other packages add by entry points."""
    added = load_plugins(GROUP, _problem_of)
    return {**RULES, **cast("dict[str, Callable[[], Rule]]", added)}


def rule_by_name(name: str, known: Mapping[str, Callable[[], Rule]] | None = None) -> Rule:
    """Build the rule of that name.

    | name | rule |
    | --- | --- |
    | "recommended", "sphere" | `SVGD("heads", alpha="auto", ratio=0.01, space="sphere", smoothing=0, act_every=4)` |
    | "paper" | `SVGD(stepsize=0.1, alpha=0.01)`, as published for translation |
    | "svgd", "spos", "sgld" | `SVGD()`, `SPOS()`, `SGLD()` with their default settings |
    | "spos-paper" | `SPOS(temperature=1.0)`: the published values, with two temperatures and noise in the gradient |
    | "logits" | `SVGD("heads", Until(500, 0.01), space="logits")` |
    | "kernel-free" | `KernelFree()`, a control for "paper": the same without a kernel |

    Args:
        name: a key of `known`.
        known: functions that build rules, by name; default: `known_rules()`.

    Raises:
        RuleError: the name is unknown, or its function, of another package, does not return a rule.

    Example:
        >>> rule_by_name("paper").stepsize
        0.1
    """
    if known is None:
        known = RULES if name in RULES else known_rules()  # built-in rules do not need the entry points
    if name not in known:
        raise RuleError(f"unknown rule {name!r}; {did_you_mean(name.lower(), known)}choose from {', '.join(known)}")
    rule = known[name]()
    if not isinstance(rule, Rule):
        raise RuleError(f"the function of rule {name!r} returned an object of type {type(rule).__name__}, not a Rule")
    return rule


def _problem_of(name: str, value: object) -> str:
    if name in RULES:
        return "a built-in rule has this name; choose another"
    return "" if callable(value) else f"expected a function that returns a Rule, got {type(value).__name__}"
