"""Noise of the fused update: the size of the noise of every slice and the step counter, on the device.

`combine_kernel` adds sigma xi to the gradients of a slice, with xi standard normal. Sigma is a number per slice: the
rule's `noise_scale` for the learning rate of its parameter, times its `noise_factor` if the rule scales its noise by
gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from repulsive.heads.layout import HeadGroup
from repulsive.particles.rule import Rule
from repulsive.repulsion.backends.addresses import SliceTable
from repulsive.repulsion.backends.device_numbers import DeviceNumbers


class DeviceNoise:
    """Sigma of every slice, and the step counter.

    Args:
        table: the table of slices.
        groups: the groups of the table.
    """

    def __init__(self, table: SliceTable, groups: Sequence[HeadGroup]) -> None:
        self.table = table
        slices, device = len(table.parts), table.device
        self.steps = torch.full((1,), -1, dtype=torch.int64, device=device)
        self._step = -1
        self.sigmas = DeviceNumbers(slices, device)
        # For a rule that scales its noise by gradients.
        self.scaled_sigmas = torch.zeros(slices, dtype=torch.float32, device=device)
        by_size: dict[int, list[int]] = {}
        for index, group in enumerate(groups):
            by_size.setdefault(group.dim, []).append(index)
        self._same_size = list(by_size.values())  # for each size, indices of the groups of that size
        positions = torch.tensor([index for indices in self._same_size for index in indices], device="cpu").argsort()
        self._position_of = positions[self.table.group_of].to(device)  # position of each slice's group in `_same_size`
        self._noise_source: _NoiseSource | None = None  # what the sigmas on the device were computed from
        self._has_noise = False

    def set(self, rule: Rule, rates: Mapping[int, float], step: int, scale: Tensor | None) -> bool:
        """Send sigma of every slice and the step counter to the device; return whether there is any noise."""
        if not rates:
            return False
        if self._noise_source is None or not self._noise_source.is_for(rule, rates, self.table.parameters):
            own = [rates.get(id(parameter), 0.0) for parameter in self.table.parameters]
            scales = {rate: rule.noise_scale(rate) for rate in set(own)}
            self._has_noise = any(scales.values())
            if self._has_noise:
                self.sigmas.set([scales[own[parameter]] for parameter in self.table.parameter_of])
            self._noise_source = _NoiseSource(rule, rates, self.table.parameters)
        if not self._has_noise:
            return False
        if rule.scales_noise:
            torch.mul(self.sigmas.tensor, self._noise_factors(rule, scale), out=self.scaled_sigmas)
        if step != self._step + 1:
            self.steps.fill_(step - 1)  # `_combine` adds one
        self._step = step
        return True

    def _noise_factors(self, rule: Rule, scale: Tensor | None) -> Tensor:
        """Compute the rule's `noise_factor` for every slice, [slices], with one call for all groups of one size."""
        factors = []
        for indices in self._same_size:
            grad = torch.stack([self.table.gradient(index) for index in indices]).float()  # [groups, M, D]
            factors.append(rule.noise_factor(grad if scale is None else grad / scale))
        return torch.cat(factors)[self._position_of]


class _NoiseSource:
    """What the size of the noise depends on."""

    def __init__(self, rule: Rule, rates: Mapping[int, float], parameters: list[Tensor]) -> None:
        self._rule, self._rates, self._parameters = rule, rates, parameters
        self._settings = dict(vars(rule))  # a frozen rule can still be changed in place

    def is_for(self, rule: Rule, rates: Mapping[int, float], parameters: list[Tensor]) -> bool:
        """Check that nothing has changed. Learning rates that change are in a new mapping."""
        return (
            rule is self._rule
            and rates is self._rates
            and parameters is self._parameters
            and vars(rule) == self._settings
        )
