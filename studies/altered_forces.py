"""Rules with an altered repulsive force, as controls: attraction, and forces that act on the wrong heads.

Both keep the drive (the part that follows the loss) and the norm of the force over all heads of a group. They differ
from the rule in the direction of the force alone, so a gain that they share is not due to repulsion.
"""

from __future__ import annotations

from dataclasses import fields, replace

from repulsive.errors import RuleError
from repulsive.particles import priors
from repulsive.particles.gram import Gram
from repulsive.particles.kernels import Interaction
from repulsive.particles.ladder import CosineLadder
from repulsive.particles.rule import Coefficients, Rule
from repulsive.particles.svgd import SVGD

ATTRACTION, WRONG_PARTNER = "attraction", "wrong partner"


class AttractingSVGD(SVGD):
    """SVGD whose force has the opposite sign: heads attract each other."""

    def interact(self, theta: Gram) -> Interaction:
        result = super().interact(theta)
        return replace(result, repulsion=-result.repulsion)


class WrongPartnerSVGD(SVGD):
    r"""SVGD in which head i receives the force of head i + s modulo M, with s = 1 + step modulo (M - 1).

    The shift s changes in each step and is never 0 modulo M. With a fixed shift the force would still spread heads.
    """

    def coefficients(self, theta: Gram, grad: Gram | None = None, *, step: int = 0) -> Coefficients:
        result = super().coefficients(theta, grad, step=step)
        if result.force is None:
            return result
        return replace(result, force=result.force.roll(-partner_shift(step, theta.num_particles), dims=-2))


class AttractingCosine(AttractingSVGD, CosineLadder):
    """The cosine ladder with attraction; see `AttractingSVGD`."""


class WrongPartnerCosine(WrongPartnerSVGD, CosineLadder):
    """The cosine ladder with forces on the wrong heads; see `WrongPartnerSVGD`."""


_CLASSES: dict[tuple[str, type[Rule]], type[SVGD]] = {
    (ATTRACTION, SVGD): AttractingSVGD,
    (ATTRACTION, CosineLadder): AttractingCosine,
    (WRONG_PARTNER, SVGD): WrongPartnerSVGD,
    (WRONG_PARTNER, CosineLadder): WrongPartnerCosine,
}


def partner_shift(step: int, heads: int) -> int:
    """Return the distance from a head to the one whose force it receives, 1 to heads - 1."""
    if heads < 2:
        raise RuleError(f"{heads} head: a head needs another one whose force it can receive")
    return 1 + step % (heads - 1)


def alter_force(rule: Rule | None, name: str) -> SVGD:
    """Return the same rule with an altered force.

    Args:
        rule: `SVGD` or `CosineLadder` with a uniform prior.
        name: `ATTRACTION` or `WRONG_PARTNER`.

    Raises:
        RuleError: another rule or prior, or an unknown name.
    """
    kind = None if rule is None else _CLASSES.get((name, type(rule)))
    if kind is None:
        raise RuleError(f"force={name!r} of {rule}: expected {ATTRACTION!r} or {WRONG_PARTNER!r} of SVGD or a cosine")
    assert isinstance(rule, SVGD)
    if priors.resolve(rule.prior).precision:
        raise RuleError(f"{rule}: its force includes the prior; choose prior='uniform'")
    return kind(**{field.name: getattr(rule, field.name) for field in fields(rule)})
