"""Look up rules by name, for `repel`, the callbacks and the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from repulsive.errors import RuleError, did_you_mean
from repulsive.particles.rule import Rule
from repulsive.particles.sgld import SGLD
from repulsive.particles.spos import SPOS
from repulsive.particles.svgd import SVGD

RuleName = Literal["recommended", "paper", "sphere", "svgd", "spos", "sgld", "logits"]
RECOMMENDED: RuleName = "recommended"  # the default of `repel` and of the callbacks

# Built on demand, so that an error in one rule does not affect the others.
RULES: dict[str, Callable[[], Rule]] = {
    "recommended": lambda: SVGD(alpha="auto", ratio=0.03, space="sphere", smoothing=0),
    "paper": lambda: SVGD(stepsize=0.1, alpha=0.01),
    "sphere": lambda: SVGD(alpha="auto", ratio=0.03, space="sphere", smoothing=0),
    "svgd": lambda: SVGD(),
    "spos": lambda: SPOS(),
    "sgld": lambda: SGLD(),
    "logits": lambda: SVGD(space="logits"),
}


def rule_by_name(name: str, known: Mapping[str, Callable[[], Rule]] = RULES) -> Rule:
    """Build a rule from its name.

    | name | rule |
    | --- | --- |
    | "recommended", "sphere" | `SVGD(alpha="auto", ratio=0.03, space="sphere", smoothing=0)` |
    | "paper" | `SVGD(stepsize=0.1, alpha=0.01)`, as published for translation |
    | "svgd", "spos", "sgld" | `SVGD()`, `SPOS()`, `SGLD()` with their default settings |
    | "logits" | `SVGD(space="logits")` |

    Args:
        name: a key of `known`.
        known: functions that build rules, by name.

    Raises:
        RuleError: the name is unknown.

    Example:
        >>> rule_by_name("paper").stepsize
        0.1
    """
    if name not in known:
        raise RuleError(f"unknown rule {name!r}; {did_you_mean(name.lower(), known)}choose from {', '.join(known)}")
    return known[name]()
