"""One optimizer step with repulsion between logits: add a force to gradients, and recompute the force when due."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.particles.rule import Rule
from repulsive.particles.svgd import SVGD
from repulsive.repulsion.backends.eager import EagerUpdate
from repulsive.repulsion.backends.inputs import StepInputs
from repulsive.repulsion.cuda_graphs import is_capturing
from repulsive.repulsion.logits.force import ForceNumbers, logit_forces
from repulsive.repulsion.logits.gather import gather_samples, world_size
from repulsive.repulsion.logits.gradient_norms import GradientNorms
from repulsive.repulsion.logits.held_forces import Held, measure_forces
from repulsive.repulsion.logits.projections import CircuitLayer, Target, logit_layers
from repulsive.repulsion.logits.renewal import is_renewed
from repulsive.repulsion.logits.sampler import Sampler
from repulsive.repulsion.logits.samples import Sample
from repulsive.repulsion.logits.value_circuits import ValueLayer, value_force, value_layers
from repulsive.repulsion.logits.writer import Writer, Written
from repulsive.repulsion.measured import Measured
from repulsive.repulsion.optimizer_noise import add_noise

MISSES = 5  # computations of the force in a row without tokens of a layer, before a warning


class NoTokensWarning(UserWarning):
    """Repulsion between logits is due, but the model was not called in training, or its hooks did not run."""


class LogitRepulsion:
    """A handle's state for repulsion between logits: layers, sampled tokens and forces.

    Args:
        model: the model.
        groups: the q and k groups of the model; also v and o (output projection) for `circuits="qk+ov"`.
        rule: a rule with `space="logits"`.
        seed: seed of the sampled positions.

    Raises:
        RuleError: the logits of a layer are not a dot product of two projections.
    """

    def __init__(self, model: nn.Module, groups: Sequence[HeadGroup], rule: SVGD, seed: int) -> None:
        self.rule = rule
        self.layers: list[CircuitLayer] = [*logit_layers(model, [g for g in groups if g.part in ("q", "k")])]
        if rule.circuits == "qk+ov":
            self.layers += value_layers(model, groups)
        tokens = -(-rule.tokens // world_size())
        self.sampler = Sampler(model, self.layers, tokens, seed)
        self.held: dict[int, Held] = {}
        self.renewals = 0  # number of times that forces were computed, so that an update notices new forces
        self._shares: dict[int, float] = {}  # number of heads -> factor on the gradient
        self._shares_of_layers = [self.share(layer) for layer in self.layers]
        self._layer_shares: Tensor | None = None  # the same, on the device of the gradients
        self._targets = [[targets for _, targets in layer.sides] for layer in self.layers]
        self._norms = GradientNorms([[target.slice for targets in one for target in targets] for one in self._targets])
        self._missed = [0] * len(self.layers)  # computations of the force in a row without tokens of a layer
        self._warned = False

    def attach(self) -> None:
        """Start to sample tokens."""
        self.sampler.attach()

    def remove(self) -> None:
        """Stop sampling."""
        self.sampler.remove()

    def expect(self, step: int) -> None:
        """Set the next optimizer step, so that the pass before it is sampled if a new force is due."""
        self.sampler.taken.step = step
        self.sampler.want(self.is_due(step))

    def rest(self, step: int) -> None:
        """Prepare for the step after one without repulsion."""
        self.free_if_off(step)
        self.expect(step + 1)

    def free_if_off(self, step: int) -> None:
        """Free forces that a schedule has switched off."""
        if self.held and self.is_off(step):
            self.held.clear()
            self.renewals += 1

    def is_due(self, step: int) -> bool:
        """Check whether a step computes a new force; never while a schedule has set the weight to zero."""
        if self.is_off(step):
            return False
        if is_capturing():
            return True
        return self.rule.acts(step) and (self._is_renewed(step) or not self.held)

    def _is_renewed(self, step: int) -> bool:
        return is_renewed(step, self.rule.every, self.rule.act_every)

    def is_off(self, step: int) -> bool:
        """Check whether a schedule has set the repulsive weight to zero."""
        return self.rule.is_off(step)

    def update(self, groups: Sequence[HeadGroup], seed: int) -> LogitUpdate:
        """Build the update of the given groups."""
        return LogitUpdate(self, groups, seed)

    def renew(self, step: int, scale: Tensor | None) -> Tensor | None:
        """Compute the force of every layer with sampled tokens, and return `drive_norms` if the rule needs them."""
        samples = dict(self.sampler.samples)
        if samples and not is_capturing():
            self._warn_of_missed_layers(samples)
        if world_size() > 1:
            samples = gather_samples(self.layers, samples, self.sampler.taken.tokens)
        if not samples:
            self._warn_without_tokens()
            return None
        rule = self.rule.acting_always() if is_capturing() else self.rule
        drives = self.drive_norms(scale) if rule.needs_gradient_products else None
        forces = logit_forces(self.layers, samples, rule, step=step, drives=drives)
        for number, layer in enumerate(self.layers):
            if isinstance(layer, ValueLayer) and (number, "v") in samples:
                drive = None if drives is None else drives[number]
                forces[number] = value_force(number, layer, samples[number, "v"], rule, step, drive)
        for number, force in forces.items():
            sides = [_written(one, part) for one, part in zip(self._targets[number], force.parts, strict=True)]
            self.held[number] = Held(sides, force.numbers, force.row)
        self.renewals += 1
        if not is_capturing():
            self.sampler.clear()
        return drives

    def drive_norms(self, scale: Tensor | None) -> Tensor:
        """Compute |drive| of every layer: the norm of its heads' gradients after scaling, without repulsion."""
        norms = self._norms()
        if set(self._shares_of_layers) != {1.0}:
            if self._layer_shares is None or self._layer_shares.device != norms.device:
                shares = torch.tensor(self._shares_of_layers, dtype=torch.float32, device="cpu")
                self._layer_shares = shares.to(norms)
            norms = self._layer_shares * norms
        return norms if scale is None else norms / scale.to(norms)

    def share(self, layer: CircuitLayer) -> float:
        """Return the factor on the gradients of a layer's heads."""
        heads = layer.num_heads
        if heads not in self._shares:
            self._shares[heads] = self.rule.drive_scale(heads)
        return self._shares[heads]

    def _warn_without_tokens(self) -> None:
        if not self._warned:
            self._warned = True
            remedy = (
                "Run the model in training mode (model.train()), with gradients and outside of torch.func; to capture "
                "a compiled model into a CUDA graph, choose every=1"
            )
            if ran := self.sampler.masks.of_layers:  # these attention modules were called in training mode
                name = self.layers[min(ran)].name
                remedy = (
                    f"{name} ran, but did not call its projections as modules: choose space='sphere' for this model"
                )
            warnings.warn(
                "space='logits': no tokens were seen before this optimizer step, so heads were not repelled. " + remedy,
                NoTokensWarning,
                stacklevel=9,
            )

    def _warn_of_missed_layers(self, samples: Mapping[tuple[int, str], Sample]) -> None:
        """Warn once about layers that give no tokens while others do.

        Layers that are dropped at random, as LayerDrop does, give tokens in one of the next passes.
        """
        if self._warned:
            return
        names = []
        for number, layer in enumerate(self.layers):
            is_sampled = all((number, part) in samples for part in layer.watched)
            self._missed[number] = 0 if is_sampled else self._missed[number] + 1
            is_evaluated = not all(projection.output.training for projection in layer.watched.values())
            if not is_sampled and (is_evaluated or self._missed[number] == MISSES):
                names.append(layer.name)
        if names:
            self._warned = True
            warnings.warn(
                f"space='logits': {len(names)} of {len(self.layers)} layers gave no tokens, so their heads were not "
                f"repelled: {', '.join(names[:6])}. A layer gives tokens only in training mode (layer.train()), with "
                "gradients, and if the model calls its projections as modules; exclude others with match=...",
                stacklevel=9,
            )

    # -- saving -------------------------------------------------------------------------------------------------

    def state(self, step: int) -> dict[str, list[Tensor]]:
        """Return the current forces by layer name; empty if the next step computes new forces.

        Each layer has one tensor per parameter, and a last tensor with the scalars of its force.
        """
        if self._is_renewed(step):
            return {}
        forces = {}
        for number, held in self.held.items():
            tensors = [one.force for side in held.sides for one in side if one.force is not None]
            numbers = torch.stack([values[held.row].double() for values in held.numbers.values])
            forces[self.layers[number].name] = [*tensors, numbers]
        return forces

    def load(self, state: Mapping[str, Any], step: int) -> None:
        """Continue with saved forces; if there are none, the next step computes new forces."""
        self.held = {}
        for number, layer in enumerate(self.layers):
            tensors = list(state.get(layer.name, ()))
            if len(tensors) != 1 + sum(len(targets) for _, targets in layer.sides):
                continue
            rest = iter(tensor.to(layer.sides[0][1][0].slice.parameter().device) for tensor in tensors)
            sides = [[Written(target.slice, next(rest)) for target in targets] for _, targets in layer.sides]
            self.held[number] = Held(sides, ForceNumbers.saved(number, next(rest)), 0)
        self.renewals += 1
        self.expect(step)


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
        forces_change = source.is_due(step) or (source.held and source.is_off(step))
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
        source.expect(step + 1)
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
        source.expect(step + 1)
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
        has_ended = self.source.is_off(step) and self.source.renewals > 0
        return measure_forces(step, self._layer_of, self.source.held, drives, has_ended=has_ended)


def _written(targets: Sequence[Target], forces: Sequence[Tensor]) -> list[Written]:
    return [Written(target.slice, force) for target, force in zip(targets, forces, strict=True)]
