"""One optimizer step with repulsion between logits: add a force to gradients, and recompute the force when due."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.particles.rule import Rule
from repulsive.repulsion.backends.eager import EagerUpdate
from repulsive.repulsion.backends.inputs import StepInputs
from repulsive.repulsion.logits.held_forces import measure_forces
from repulsive.repulsion.logits.repulsion import LogitRepulsion
from repulsive.repulsion.logits.writer import Writer
from repulsive.repulsion.measured import Measured
from repulsive.repulsion.optimizer_noise import add_noise


class LogitUpdate:
    """The update of a fixed set of groups; the counterpart of `Update` for `space="logits"`."""

    def __init__(self, source: LogitRepulsion, groups: Sequence[HeadGroup], seed: int) -> None:
        self.groups = list(groups)
        self.source = source
        self._names = {group.name for group in groups}
        self._noise = EagerUpdate(self.groups, seed)
        self._renewals = -1
        numbers = {group.name: number for number, layer in enumerate(source.layers) for group, _ in layer.sides}
        self._layer_of = {group.name: numbers[group.name] for group in groups}  # group name -> number of its layer
        self._writers = self._make_writers()

    def again(self, inputs: StepInputs) -> list[Measured] | None:
        """Repeat the last `run` without looking up parameters; see `Update.again`.

        Returns:
            None, with nothing done, if this step computes new forces, or if a parameter is sharded or frozen, or has no
            gradient.
        """
        step, scale, source = inputs.step, inputs.scale, self.source
        forces_change = source.is_due(step) or (source.held and source.rule.is_off(step))
        if inputs.rule is None or self._renewals != source.renewals or forces_change:
            return None
        gradients = []
        for writer, _ in self._writers:
            if (current := writer.trained_gradients()) is None:
                return None
            gradients.append(current)
        with torch.no_grad():
            measured = self._measure(step, source.drive_norms(scale)) if inputs.measure else []
            for (writer, _), current in zip(self._writers, gradients, strict=True):
                writer.write(scale, current)
            self._add_noise_to_gradients(inputs)
        return measured

    def run(self, inputs: StepInputs) -> list[Measured]:
        """Replace the gradients of all groups; see `Update.run`."""
        rule, step, scale, source = inputs.rule, inputs.step, inputs.scale, self.source
        assert rule is not None
        with torch.no_grad():
            drives = None
            if source.is_due(step):
                drives = source.renew(step, scale)
            else:
                source.free_if_off(step)
            measured = []
            if inputs.measure:
                measured = self._measure(step, source.drive_norms(scale) if drives is None else drives)
            if self._renewals != source.renewals:
                self._load_writers()
            for writer, _ in self._writers:
                writer.write(scale)
            self._add_noise_to_gradients(inputs)
        return measured

    def _add_noise_to_gradients(self, inputs: StepInputs) -> None:
        rule = inputs.rule
        if rule is not None and inputs.draw_noise and rule.noise_scale(1.0):
            self._noise.add_to_gradients(rule, inputs.rates, step=inputs.step, scale=inputs.scale)

    def add_noise(self, rule: Rule, rates: Mapping[int, float], *, step: int) -> None:
        """Add the noise of a rule to the parameters."""
        self._noise.add_noise(rule, rates, step=step)

    def add_step_noise(self, rule: Rule, optimizer: Optimizer, *, step: int) -> None:
        """Add the noise of a rule to parameters and momentum buffers, after a step of the optimizer."""
        add_noise(rule, optimizer, self._noise.standard_noise(step=step))

    def _make_writers(self) -> list[tuple[Writer, list[tuple[int, int, int]]]]:
        """Build one writer for each factor on gradients, which depends on the number of heads.

        Returns:
            Writers, each with the layer, the side and the target of its slices.
        """
        by_share: dict[float, tuple[list[HeadSlice], list[tuple[int, int, int]]]] = {}
        for number, layer in enumerate(self.source.layers):
            for side, (group, targets) in enumerate(layer.sides):
                if group.name in self._names:
                    slices, places = by_share.setdefault(self.source.share(layer), ([], []))
                    slices += [target.slice for target in targets]
                    places += [(number, side, index) for index in range(len(targets))]
        return [(Writer(slices, share), places) for share, (slices, places) in by_share.items()]

    def _load_writers(self) -> None:
        """Give the current forces to the writers."""
        held = self.source.held
        for writer, places in self._writers:
            writer.load([held[n].sides[side][index].force if n in held else None for n, side, index in places])
        self._renewals = self.source.renewals

    def _measure(self, step: int, drives: Tensor) -> list[Measured]:
        """Measure all groups with a force; after a schedule has ended repulsion, only their drive is known.

        Args:
            step: optimizer step.
            drives: the result of `drive_norms`.
        """
        has_ended = self.source.rule.is_off(step) and self.source.renewals > 0
        return measure_forces(step, self._layer_of, self.source.held, drives, has_ended=has_ended)
