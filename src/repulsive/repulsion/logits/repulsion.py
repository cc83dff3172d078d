"""State of repulsion between logits: layers, sampled tokens, and the forces in use until new ones are due."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.errors import warn_user
from repulsive.heads.layout import HeadGroup
from repulsive.particles.svgd import SVGD
from repulsive.repulsion.cuda_graphs import is_capturing
from repulsive.repulsion.logits.find_projections import logit_layers
from repulsive.repulsion.logits.force import ForceNumbers, logit_forces
from repulsive.repulsion.logits.gather import gather_samples, world_size
from repulsive.repulsion.logits.gradient_norms import GradientNorms
from repulsive.repulsion.logits.held_forces import HeldForce
from repulsive.repulsion.logits.projections import CircuitLayer, Target
from repulsive.repulsion.logits.renewal import is_renewed
from repulsive.repulsion.logits.sampler import Sampler
from repulsive.repulsion.logits.samples import Sample
from repulsive.repulsion.logits.value_circuits import ValueLayer, value_force, value_layers
from repulsive.repulsion.logits.writer import Written

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
        self.held: dict[int, HeldForce] = {}
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

    def free_if_off(self, step: int) -> None:
        """Free forces that a schedule has switched off."""
        if self.held and self.rule.is_off(step):
            self.held.clear()
            self.renewals += 1

    def is_due(self, step: int) -> bool:
        """Check whether a step computes a new force; never while a schedule has set the weight to zero."""
        if self.rule.is_off(step):
            return False
        if is_capturing():
            return True
        return self.rule.acts(step) and (self._is_renewed(step) or not self.held)

    def _is_renewed(self, step: int) -> bool:
        return is_renewed(step, self.rule.every, self.rule.act_every)

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
            self.held[number] = HeldForce(sides, force.numbers, force.row)
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
            warn_user(
                "space='logits': no tokens were seen before this optimizer step, so heads were not repelled. " + remedy,
                NoTokensWarning,
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
            warn_user(
                f"space='logits': {len(names)} of {len(self.layers)} layers gave no tokens, so their heads were not "
                f"repelled: {', '.join(names[:6])}. A layer gives tokens only in training mode (layer.train()), with "
                "gradients, and if the model calls its projections as modules; exclude others with match=..."
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

    def load(self, state: Mapping[str, Any], step: int, seed: int) -> None:
        """Continue with saved forces; if there are none, the next step computes new forces.

        Args:
            state: the result of `state`.
            step: number of optimizer steps taken.
            seed: seed of the sampled positions.
        """
        self.sampler.clear()
        self.sampler.taken.seed = seed
        self.held = {}
        for number, layer in enumerate(self.layers):
            tensors = list(state.get(layer.name, ()))
            if len(tensors) != 1 + sum(len(targets) for _, targets in layer.sides):
                continue
            rest = iter(tensor.to(layer.sides[0][1][0].slice.parameter().device) for tensor in tensors)
            sides = [[Written(target.slice, next(rest)) for target in targets] for _, targets in layer.sides]
            self.held[number] = HeldForce(sides, ForceNumbers.saved(number, next(rest)), 0)
        self.renewals += 1
        self.expect(step)


def _written(targets: Sequence[Target], forces: Sequence[Tensor]) -> list[Written]:
    return [Written(target.slice, force) for target, force in zip(targets, forces, strict=True)]
