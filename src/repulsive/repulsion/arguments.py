"""Types of the keyword arguments of `repel`, for functions that pass them on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from repulsive.heads.discover import Layout
from repulsive.heads.layout import HeadGroup
from repulsive.heads.select import LayersName, Particle, Parts, Where
from repulsive.particles.named import RuleName
from repulsive.particles.rule import Rule
from repulsive.repulsion.settings import ForcePlace, NoisePlace, Order


class RepelSettings(TypedDict, total=False):
    """The arguments of `repel` except model, optimizer and rule, for `**settings: Unpack[RepelSettings]`."""

    layers: LayersName | Sequence[int]
    parts: Parts
    where: Where
    particle: Particle
    match: str | Sequence[str] | None
    groups: Sequence[HeadGroup] | None
    layout: Layout
    example_inputs: Any
    allow_unproved: bool
    order: Order
    max_norm: float | None
    noise_in: NoisePlace
    force_in: ForcePlace
    seed: int
    measure_every: int
    verbose: bool | None


class RuleAndSettings(RepelSettings, total=False):
    """The arguments of `repel` except model and optimizer."""

    rule: Rule | RuleName | None
