"""Variants of the fused update: what its launches are compiled for, and what is kept between steps."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from repulsive.particles import bandwidths
from repulsive.particles.rule import RadialForm, Rule, epsilon


class Combination(NamedTuple):
    """What the launch that writes the new gradients is compiled for.

    Args:
        has_force: add B theta.
        is_noisy: add noise.
        is_scaled: gradients contain a loss scale.
        scales_noise: sigma of the noise depends on the gradients.
        scales_gradients: the matrix A is a multiple of the identity.
    """

    has_force: bool = True
    is_noisy: bool = False
    is_scaled: bool = False
    scales_noise: bool = False
    scales_gradients: bool = False


class Variant(NamedTuple):
    """Everything that the launches of an update are compiled for, apart from the table of slices.

    The numbers of a rule (step size, alpha, ratio, ...) are not part of it: the launches read them from the device.
    """

    kernel: str
    bandwidth: str
    on_sphere: bool
    smooths: bool
    holds_ratio: bool
    has_force: bool
    measures: bool
    is_noisy: bool
    is_scaled: bool
    scales_noise: bool

    @property
    def reads_particles(self) -> bool:
        """Whether the matrices A and B, or a measurement, depend on weights or gradients."""
        return self.kernel != "none" or self.measures

    @property
    def reads_gradients(self) -> bool:
        """Whether norms of gradients are needed before A and B."""
        return self.holds_ratio or self.measures

    @property
    def scales_gradients(self) -> bool:
        """Whether the matrix A is a multiple of the identity."""
        return self.kernel == "none" or not self.smooths

    @property
    def combination(self) -> Combination:
        """What `combine_kernel` is compiled for."""
        return Combination(self.has_force, self.is_noisy, self.is_scaled, self.scales_noise, self.scales_gradients)


class Prepared(NamedTuple):
    """What `FusedUpdate.run` derives from a rule without a schedule; it is the same in every step.

    Args:
        rule: the rule.
        settings: its attributes.
        variant: what to launch.
        number: number of the variant in the graph cache.
    """

    rule: Rule
    settings: dict[str, Any]
    variant: Variant
    number: int

    def is_for(self, rule: Rule) -> bool:
        """Check whether this is the rule, with the same settings. A frozen rule can still be changed in place."""
        return rule is self.rule and vars(rule) == self.settings


def settings_of(form: RadialForm, heads: int) -> list[float]:
    """List the numbers of a rule that `solve_kernel` reads, in the order in which it reads them."""
    fixed = form.threshold if isinstance(form.bandwidth, str) else form.bandwidth
    counted = max(heads, 2) if form.bandwidth == "paper" else heads + 1  # a single head has no bandwidth
    alpha = form.alpha if form.ratio is None else form.ratio
    weights = [epsilon(form.stepsize, heads), alpha, form.own_drive, form.smoothing, form.precision]
    return [*weights, fixed, bandwidths.FLOOR**2, math.log(counted)]
