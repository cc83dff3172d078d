"""One update of many groups: fused where that is possible, by the reference elsewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from repulsive.heads.layout import HeadGroup
from repulsive.particles.rule import Measure, Rule
from repulsive.repulsion import blocks, plan
from repulsive.repulsion.blocks import Piece
from repulsive.repulsion.plan import Plan


@dataclass(frozen=True)
class Measured:
    """One group's row in a measurement of several; numbers stay on their device until someone looks."""

    step: int
    measure: Measure
    row: int | None = None

    def values(self) -> dict[str, float]:
        """Every field of the measure as a number."""
        tensors: dict[str, Tensor] = vars(self.measure)
        return {name: float(value if self.row is None else value[self.row]) for name, value in tensors.items()}


class Update:
    """The slices of a fixed set of groups, laid out for repeated updates."""

    def __init__(self, groups: Sequence[HeadGroup], seed: int) -> None:
        self.groups = list(groups)
        self._seed = seed
        self._plans: list[Plan] | None = None
        self._rest: list[int] = []

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
            rule: what to do; None only measures.
            rates: learning rate by id of parameter.
            step: optimiser steps taken so far.
            scale: what gradients are multiplied with right now (AMP under a fused optimiser).
            measure: also measure drive, repulsion, bandwidth and distance.
            draw_noise: False where the noise is added to parameters instead.

        Returns:
            What was measured, by group name.
        """
        ready = self._ready() if rule is not None and plan.supports(rule) else None
        if rule is None or ready is None:
            return self._reference(range(len(self.groups)), rule, rates, step, scale, measure, draw_noise)
        found: dict[str, Measured] = {}
        for one in ready:
            own = [rates.get(id(piece.slice.parameter()), 0.0) for piece in one.pieces] if rates else ()
            measured = one.run(rule, step=step, scale=scale, rates=own, draw_noise=draw_noise, measure=measure)
            if measured is not None:
                found |= {self.groups[i].name: Measured(step, measured, row) for row, i in enumerate(one.groups)}
        return found | self._reference(self._rest, rule, rates, step, scale, measure, draw_noise)

    def add_noise(self, rule: Rule, rates: Mapping[int, float], *, step: int) -> None:
        """Add a rule's noise to the parameters themselves."""
        blocks.add_noise(self._pieces(range(len(self.groups)), rates), rule, step=step, seed=self._seed)

    def _reference(
        self,
        indices: Sequence[int],
        rule: Rule | None,
        rates: Mapping[int, float],
        step: int,
        scale: Tensor | None,
        measure: bool,
        draw_noise: bool,
    ) -> dict[str, Measured]:
        if not indices:
            return {}
        groups = [self.groups[index] for index in indices]
        measured = blocks.update(
            groups,
            self._pieces(indices, rates),
            rule,
            step=step,
            seed=self._seed,
            scale=scale,
            measure=measure,
            draw_noise=draw_noise,
        )
        return {group.name: Measured(step, m) for group, m in zip(groups, measured, strict=True) if m is not None}

    def _pieces(self, indices: Sequence[int], rates: Mapping[int, float]) -> list[Piece]:
        return [
            Piece(row, part, f"{self.groups[index].name}/{number}", rates.get(id(part.parameter()), 0.0))
            for row, index in enumerate(indices)
            for number, part in enumerate(self.groups[index].slices)
        ]

    def _ready(self) -> list[Plan] | None:
        """Plans that point at today's weights and gradients, or None where the reference has to do."""
        if not plan.wanted(self.groups[0].slices[0].parameter().device):
            return None
        if self._plans is None:
            self._plans = self._lay_out()
        return self._plans if all(one.refresh() for one in self._plans) else None

    def _lay_out(self) -> list[Plan]:
        """One plan per number of heads, dtype and device; groups that cannot be read in place are left to `_rest`."""
        buckets: dict[tuple[int, torch.dtype, torch.device], list[int]] = defaultdict(list)
        self._rest = []
        for index, group in enumerate(self.groups):
            parameters = group.parameters()
            same = len({(p.dtype, p.device) for p in parameters}) == 1
            if same and all(plan.fits(part) for part in group.slices):
                buckets[group.num_heads, parameters[0].dtype, parameters[0].device].append(index)
            else:
                self._rest.append(index)
        made = []
        for members in buckets.values():
            pieces = self._pieces(members, {})
            placed = [Piece(members[piece.group], piece.slice, piece.noise_name, 0.0) for piece in pieces]
            made.append(Plan(placed, members, self._seed))
        return made
