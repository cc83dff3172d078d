"""Rules that the benchmark measures, by name."""

from __future__ import annotations

from collections.abc import Sequence

from repulsive import RuleError
from repulsive.particles.named import RULES, known_rules, rule_by_name
from repulsive.particles.rule import Rule

SAME = ("svgd",)  # equal to "paper": measured only if requested by name


def build_rules(names: Sequence[str]) -> dict[str, Rule]:
    """Build the named rules.

    Args:
        names: keys of `RULES`, or rules of other packages; a name given twice counts once.

    Raises:
        RuleError: a name is unknown, or its rule cannot be built.

    Example:
        >>> build_rules(["paper"])["paper"].stepsize
        0.1
    """
    known = {**known_rules(), **RULES}
    return {name: rule_by_name(name, known) for name in names}


def available_rules() -> tuple[dict[str, Rule], dict[str, str]]:
    """Build every known rule except those in `SAME`.

    Returns:
        The rules by name, and for rules that cannot be built the reason.
    """
    rules: dict[str, Rule] = {}
    reasons: dict[str, str] = {}
    for name, factory in RULES.items():
        if name in SAME:
            continue
        try:
            rules[name] = factory()
        except RuleError as error:
            reasons[name] = str(error)
    return rules, reasons
