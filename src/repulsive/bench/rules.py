"""Rules that the benchmark knows by name. Each is built when it is asked for, so that one that fails stops no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches

from repulsive import SGLD, SPOS, SVGD, RuleError
from repulsive.particles.rule import Rule

RULES: dict[str, Callable[[], Rule]] = {
    "paper": lambda: SVGD(),
    "sphere": lambda: SVGD(alpha="auto", ratio=0.03, space="sphere", smoothing=0),
    "spos": lambda: SPOS(),
    "sgld": lambda: SGLD(),
    "logits": lambda: SVGD(space="logits"),
}


def build_rules(names: Sequence[str]) -> dict[str, Rule]:
    """Build the named rules.

    Args:
        names: keys of `RULES`; a name given twice counts once.

    Raises:
        RuleError: a name is unknown, or its rule cannot be built.

    Example:
        >>> build_rules(["paper"])["paper"].stepsize
        0.1
    """
    for name in names:
        if name not in RULES:
            near = get_close_matches(name, RULES, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise RuleError(f"unknown rule {name!r}; {hint}choose from {', '.join(RULES)}")
    return {name: RULES[name]() for name in names}


def available_rules() -> tuple[dict[str, Rule], dict[str, str]]:
    """Build every known rule.

    Returns:
        The rules that can be built, by name; and for the others the reason why not.
    """
    rules: dict[str, Rule] = {}
    reasons: dict[str, str] = {}
    for name, factory in RULES.items():
        try:
            rules[name] = factory()
        except RuleError as error:
            reasons[name] = str(error)
    return rules, reasons
