"""One update of many groups: fused where that is possible, by the reference elsewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from repulsive.heads.layout import HeadGroup
from repulsive.particles.rule import Rule
from repulsive.repulsion.backends import fused as plan
from repulsive.repulsion.backends.addresses import fits
from repulsive.repulsion.backends.eager import Measured, Reference
from repulsive.repulsion.backends.fused import Plan
from repulsive.triton_setting import use_triton


class Update:
    """The slices of a fixed set of groups, laid out for repeated updates."""

    def __init__(self, groups: Sequence[HeadGroup], seed: int) -> None:
        self.groups = list(groups)
        self._seed = seed
        self._everything: Reference | None = None
        self._rest: Reference | None = None  # groups no plan can hold
        self._plans: list[Plan] | None = None

    def again(self, rule: Rule | None) -> bool:
        """Repeat the last `run` on today's gradients, if that is a replay and all groups have some; else do nothing."""
        if self._plans is None or self._rest is not None:
            return False
        graphs = [one.again(rule) for one in self._plans]
        if None in graphs:
            return False
        for graph in graphs:
            graph.replay()  # type: ignore[union-attr]
        return True

    def run(
        self,
        rule: Rule | None,
        rates: Mapping[int, float],
        *,
        step: int,
        scale: Tensor | None = None,
        measure: bool = False,
        draw_noise: bool = True,
    ) -> dict[str, Measured]:
        """Replace the gradients of all groups by what `rule` makes of them.

        Args:
            rule: what to do; None leaves gradients as they are, and only measures.
            rates: learning rate by id of parameter, for the noise.
            step: optimiser steps taken so far.
            scale: what gradients are multiplied with right now (AMP under a fused optimiser).
            measure: also measure drive, repulsion, bandwidth and distance.
            draw_noise: False where the noise is added to parameters instead.

        Returns:
            What was measured, by group name.
        """
        ready = self._ready() if rule is not None and plan.supports(rule) else None
        if rule is None or ready is None:
            return self._reference().run(rule, rates, step=step, scale=scale, measure=measure, draw_noise=draw_noise)
        found: dict[str, Measured] = {}
        for one in ready:
            measured = one.run(rule, rates, step=step, scale=scale, draw_noise=draw_noise, measure=measure)
            if measured is not None:
                found |= {group.name: Measured(step, measured, row) for row, group in enumerate(one.groups)}
        if self._rest is not None:
            found |= self._rest.run(rule, rates, step=step, scale=scale, measure=measure, draw_noise=draw_noise)
        return found

    def add_noise(self, rule: Rule, rates: Mapping[int, float], *, step: int) -> None:
        """Add a rule's noise to the parameters themselves."""
        self._reference().add_noise(rule, rates, step=step)

    def _reference(self) -> Reference:
        if self._everything is None:
            self._everything = Reference(self.groups, self._seed)
        return self._everything

    def _ready(self) -> list[Plan] | None:
        """Plans that point at today's weights and gradients, or None where the reference has to do."""
        if not use_triton(self.groups[0].slices[0].parameter().device.type):
            return None
        if self._plans is None:
            self._plans = self._lay_out()
        return self._plans if all(one.refresh() for one in self._plans) else None

    def _lay_out(self) -> list[Plan]:
        """One plan per number of heads, dtype and device; groups that cannot be read in place are left to `_rest`."""
        buckets: dict[tuple[int, torch.dtype, torch.device], list[HeadGroup]] = defaultdict(list)
        rest = []
        for group in self.groups:
            parameters = group.parameters()
            alike = len({(p.dtype, p.device) for p in parameters}) == 1
            if alike and all(fits(part) for part in group.slices):
                buckets[group.num_heads, parameters[0].dtype, parameters[0].device].append(group)
            else:
                rest.append(group)
        self._rest = Reference(rest, self._seed) if rest else None
        return [Plan(members, self._seed) for members in buckets.values()]
