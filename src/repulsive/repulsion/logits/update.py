"""One optimizer step with heads that repel in their logits: gradients plus a force that is renewed now and then."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.heads.layout import HeadGroup
from repulsive.particles.rule import Measure, Rule
from repulsive.particles.svgd import SVGD
from repulsive.repulsion.backends.eager import EagerUpdate, Measured
from repulsive.repulsion.cuda_graphs import is_capturing
from repulsive.repulsion.logits.force import LayerForce, logit_forces
from repulsive.repulsion.logits.projections import CircuitLayer, Target, logit_layers
from repulsive.repulsion.logits.renewal import is_renewed
from repulsive.repulsion.logits.sharing import share, world_size
from repulsive.repulsion.logits.tokens import Sampler
from repulsive.repulsion.logits.values import ValueLayer, value_force, value_layers
from repulsive.repulsion.logits.write import Writer, Written, gradient_norms


@dataclass
class Held:
    """The force on one layer as it is added to gradients until it is renewed.

    Args:
        sides: parameters with what is added to their gradients, for each side of the layer.
        measured: the numbers of the force, without its tensors.
    """

    sides: list[list[Written]]
    measured: LayerForce


class LogitRepulsion:
    """What a handle needs beside its groups where heads repel in their logits: layers, tokens, forces.

    Args:
        model: the model.
        groups: its q and k groups; v and o as well for `circuits="qk+ov"`.
        rule: with `space="logits"`.
        seed: of the sampled positions.

    Raises:
        RuleError: a layer's logits are not known.
    """

    def __init__(self, model: nn.Module, groups: Sequence[HeadGroup], rule: SVGD, seed: int) -> None:
        self.rule = rule
        self.layers: list[CircuitLayer] = [*logit_layers(model, [g for g in groups if g.part in ("q", "k")])]
        if rule.circuits == "qk+ov":
            self.layers += value_layers(model, groups)
        tokens = -(-rule.tokens // world_size())
        self.sampler = Sampler(model, self.layers, tokens, seed)
        self.held: dict[int, Held] = {}
        self.renewals = 0  # so that an update knows when forces are new
        self._shares: dict[int, float] = {}  # by number of heads
        self._warned = False

    def attach(self) -> None:
        """Start to watch the projections."""
        self.sampler.attach()

    def remove(self) -> None:
        """Stop watching."""
        self.sampler.remove()

    def expect(self, step: int) -> None:
        """Say which optimizer step comes next, so that the pass before it is sampled if a new force is due."""
        self.sampler.taken.step = step
        self.sampler.want(self.is_due(step))

    def is_due(self, step: int) -> bool:
        """Whether a step computes a new force. While a schedule's weight is zero, none does."""
        if self.is_off(step):
            return False
        return is_renewed(step, self.rule.every) or not self.held or is_capturing()

    def is_off(self, step: int) -> bool:
        """Whether a schedule has set the repulsive weight to zero."""
        return callable(self.rule.alpha) and self.rule.alpha(step) == 0

    def update(self, groups: Sequence[HeadGroup], seed: int) -> LogitUpdate:
        """The update of some of the groups."""
        return LogitUpdate(self, groups, seed)

    def renew(self, step: int, scale: Tensor | None) -> None:
        """Compute the force of every layer whose tokens were seen."""
        samples = dict(self.sampler.samples)
        if world_size() > 1:
            samples = share(self.layers, samples, self.sampler.taken.tokens)
        if not samples:
            self._warn_of_no_tokens()
            return
        drives = self.drive_norms(scale) if self.rule.needs_gradient_products else None
        forces = logit_forces(self.layers, samples, self.rule, step=step, drives=drives)
        for number, layer in enumerate(self.layers):
            if isinstance(layer, ValueLayer) and (number, "v") in samples:
                drive = None if drives is None else drives[number]
                forces[number] = value_force(layer, samples[number, "v"], self.rule, step, drive)
        for number, force in forces.items():
            targets = [targets for _, targets in self.layers[number].sides]
            sides = [_written(one, part) for one, part in zip(targets, force.parts, strict=True)]
            self.held[number] = Held(sides, replace(force, parts=()))
        self.renewals += 1
        if not is_capturing():
            self.sampler.clear()

    def drive_norms(self, scale: Tensor | None) -> Tensor:
        """|drive| of every layer: its q and k gradients as the optimizer receives them, without repulsion."""
        parts = [[target.slice for _, targets in layer.sides for target in targets] for layer in self.layers]
        norms = gradient_norms(parts)
        shares = torch.tensor([self.share(layer) for layer in self.layers]).to(norms)
        return shares * norms if scale is None else shares * norms / scale.to(norms)

    def share(self, layer: CircuitLayer) -> float:
        """What the gradients of a layer's heads are multiplied with."""
        heads = layer.num_heads
        if heads not in self._shares:
            self._shares[heads] = self.rule.drive_scale(heads)
        return self._shares[heads]

    def _warn_of_no_tokens(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "space='logits': no tokens were seen before this optimizer step, so heads were not repelled. The model "
                "must run in training mode (model.train()) with gradients; a model that was compiled and run before "
                "repel must be compiled again (torch.compiler.reset())",
                stacklevel=8,
            )

    # -- saving -------------------------------------------------------------------------------------------------

    def state(self, step: int) -> dict[str, list[Tensor]]:
        """The forces in use by name of layer, where the next step would not compute new ones.

        A layer has a tensor for each parameter, then one with the numbers of its force, for measurements.
        """
        if is_renewed(step, self.rule.every):
            return {}
        found = {}
        for number, held in self.held.items():
            tensors = [one.force for side in held.sides for one in side if one.force is not None]
            found[self.layers[number].name] = [*tensors, torch.stack([x.double() for x in held.measured.numbers])]
        return found

    def load(self, state: Mapping[str, Any], step: int) -> None:
        """Go on with saved forces; without them the next step computes new ones."""
        self.held = {}
        for number, layer in enumerate(self.layers):
            tensors = list(state.get(layer.name, ()))
            if len(tensors) != 1 + sum(len(targets) for _, targets in layer.sides):
                continue
            rest = iter(tensor.to(layer.sides[0][1][0].slice.parameter().device) for tensor in tensors)
            sides = [[Written(target.slice, next(rest)) for target in targets] for _, targets in layer.sides]
            self.held[number] = Held(sides, LayerForce((), *next(rest).unbind(0)))
        self.renewals += 1
        self.expect(step)


class LogitUpdate:
    """The update of a fixed set of q and k groups; the counterpart of `Update` for rules that read tokens."""

    def __init__(self, source: LogitRepulsion, groups: Sequence[HeadGroup], seed: int) -> None:
        self.groups = list(groups)
        self.source = source
        self._names = {group.name for group in groups}
        self._noise = EagerUpdate(self.groups, seed)
        self._writers: list[Writer] = []
        self._renewals = -1
        self._numbers: dict[str, int] = {}
        for number, layer in enumerate(source.layers):
            self._numbers |= {group.name: number for group, _ in layer.sides}

    def again(self, rule: Rule | None) -> bool:
        """Never a replay: forces change."""
        return False

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
        """Replace the gradients of all groups; see `Update.run`."""
        assert rule is not None
        source = self.source
        with torch.no_grad():
            if source.is_due(step):
                source.renew(step, scale)
            elif source.held and source.is_off(step):
                source.held.clear()
                source.renewals += 1
            measured = self._measure(step, scale) if measure else {}
            if self._renewals != source.renewals:
                self._writers, self._renewals = self._make_writers(), source.renewals
            for writer in self._writers:
                writer.write(scale)
            if draw_noise and rule.noise_scale(1.0):
                self._noise.add_to_gradients(rule, rates, step=step, scale=scale)
        source.expect(step + 1)
        return measured

    def add_noise(self, rule: Rule, rates: Mapping[int, float], *, step: int) -> None:
        """Add a rule's noise to the parameters themselves."""
        self._noise.add_noise(rule, rates, step=step)

    def _make_writers(self) -> list[Writer]:
        """One for each number of heads, by which gradients are divided."""
        found: dict[float, list[Written]] = {}
        for number, layer in enumerate(self.source.layers):
            held = self.source.held.get(number)
            for index, (group, targets) in enumerate(layer.sides):
                if group.name in self._names:
                    nothing = [Written(target.slice, None) for target in targets]
                    written = nothing if held is None else held.sides[index]
                    found.setdefault(self.source.share(layer), []).extend(written)
        return [Writer(written, share) for share, written in found.items()]

    def _measure(self, step: int, scale: Tensor | None) -> dict[str, Measured]:
        drives = self.source.drive_norms(scale)
        found: dict[str, Measured] = {}
        for group in self.groups:
            number = self._numbers[group.name]
            if (held := self.source.held.get(number)) is not None:
                force = held.measured
                values = (drives[number], force.norm, force.bandwidth, force.distance, force.alpha)
                measure = Measure(*(value.reshape(1) for value in (*values, force.similarity, force.largest)))
                found[group.name] = Measured(step, measure, 0)
        return found


def _written(targets: Sequence[Target], forces: Sequence[Tensor]) -> list[Written]:
    return [Written(target.slice, force) for target, force in zip(targets, forces, strict=True)]
