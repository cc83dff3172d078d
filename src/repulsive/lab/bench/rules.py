"""Cases that the benchmark measures, by name: a rule, and the settings of `repel`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from repulsive import RuleError
from repulsive.particles.named import NOISE_IN_GRADIENT, RULES, known_rules, rule_by_name
from repulsive.particles.rule import Rule
from repulsive.particles.schedules import Linear
from repulsive.particles.svgd import SVGD
from repulsive.repulsion.settings import NoisePlace

SAME = ("svgd", "recommended")  # equal to "paper" and to "sphere": measured only if requested by name
MAX_NORM = 1.0


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Args:
        rule: the rule.
        max_norm: limit of the gradient norm, for `repel` and for the plain turns to compare with; None does not clip.
        noise_in: as in `repel`.
    """

    rule: Rule
    max_norm: float | None = None
    noise_in: NoisePlace = "auto"


# Rows beside the rules that `repel` knows by name.
MORE: dict[str, Callable[[], Case]] = {
    "auto": lambda: Case(SVGD(alpha="auto")),
    "schedule": lambda: Case(SVGD(alpha=Linear(0.01, 0.0, 10_000))),
    "max-norm": lambda: Case(SVGD(), MAX_NORM),
}


def build_cases(names: Sequence[str]) -> dict[str, Case]:
    """Build the named cases.

    Args:
        names: keys of `MORE` or of `RULES`, or rules of other packages; a name given twice counts once.

    Raises:
        RuleError: a name is unknown, or its rule cannot be built.

    Example:
        >>> build_cases(["paper"])["paper"].rule.stepsize
        0.1
    """
    known = {**known_rules(), **RULES, **dict.fromkeys(MORE, SVGD)}  # for the message about an unknown name
    return {name: MORE[name]() if name in MORE else _case(name, rule_by_name(name, known)) for name in names}


def available_cases() -> tuple[dict[str, Case], dict[str, str]]:
    """Build every case except those in `SAME`.

    Returns:
        The cases by name, and for rules that cannot be built the reason.
    """
    cases: dict[str, Case] = {}
    reasons: dict[str, str] = {}
    for name in [name for name in (*RULES, *MORE) if name not in SAME]:
        try:
            cases[name] = MORE[name]() if name in MORE else _case(name, RULES[name]())
        except RuleError as error:
            reasons[name] = str(error)
    return cases, reasons


def _case(name: str, rule: Rule) -> Case:
    """Measure a rule as `repel` runs it by that name."""
    return Case(rule, noise_in="gradient" if name in NOISE_IN_GRADIENT else "auto")
