"""Inputs of one update of heads."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from repulsive.particles.rule import Rule


class StepInputs(NamedTuple):
    """What an update needs to know about one optimizer step.

    Args:
        rule: the rule; None leaves gradients as they are and only measures.
        step: optimizer steps taken so far.
        rates: parameter id -> learning rate, for the noise; empty if none is drawn.
        scale: the loss scale that the gradients still contain (AMP with a fused optimizer), or None.
        measure: also measure drive, repulsion, bandwidth and distance.
        draw_noise: whether to add noise to gradients; False if `add_noise` adds it to parameters instead.
    """

    rule: Rule | None
    step: int
    rates: Mapping[int, float] = MappingProxyType({})
    scale: Tensor | None = None
    measure: bool = False
    draw_noise: bool = True
