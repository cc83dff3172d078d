"""Run a rule in one optimizer step: on the gradients before it, and on the parameters after it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from repulsive.particles.rule import Rule
from repulsive.repulsion.active_updates import ActiveUpdates
from repulsive.repulsion.backends.inputs import StepInputs
from repulsive.repulsion.cuda_graphs import is_capturing
from repulsive.repulsion.learning_rates import LearningRates
from repulsive.repulsion.logits.repulsion import LogitRepulsion
from repulsive.repulsion.measured import Measured
from repulsive.repulsion.measurements import Measurements, per_step
from repulsive.repulsion.optimizers import ascended_gradients, ascends
from repulsive.repulsion.parameter_lookup import are_same
from repulsive.repulsion.settings import Settings
from repulsive.repulsion.step_force import StepForce


class RuleStep:
    """The work of a handle in an optimizer step. `Handle` decides when each method runs.

    Rule, settings and the number of steps belong to the handle, which may replace them between two steps.

    Args:
        optimizer: the torch optimizer that trains the heads.
        updates: the updates of the groups of heads.
        measurements: where measurements are stored.
        step_force: repulsion that is not part of the gradients; None if it is.
        logits: layers, tokens and forces, for a rule that reads tokens.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        updates: ActiveUpdates,
        measurements: Measurements,
        step_force: StepForce | None,
        logits: LogitRepulsion | None,
    ) -> None:
        self._optimizer, self._updates, self._measurements = optimizer, updates, measurements
        self._step_force, self._logits = step_force, logits
        self._rates = LearningRates(optimizer)
        self._trained: list[list[Tensor]] = []  # parameters of the optimizer at the last step that looked them up

    def acts(self, rule: Rule | None, settings: Settings, step: int) -> bool:
        """Check whether the rule acts, or is measured while its weight is zero. A step that is captured always acts."""
        if rule is None or rule.acts(step):
            return True
        return (step % rule.act_every == 0 and _measures(rule, settings, step)) or is_capturing()

    def skip(self, rule: Rule | None, step: int) -> bool:
        """Leave the gradients of a step as they are.

        Args:
            rule: the rule of this step, which does not act.
            step: optimizer steps taken so far.

        Returns:
            False if no head has a gradient: as in a step that acts, such a step is not counted.
        """
        if not self._updates.has_gradients(self._optimizer, warns=rule is not None and not rule.is_off(step)):
            return False
        if self._logits is not None:
            self._logits.free_if_off(step)
        return True

    def begin(self, rule: Rule | None, settings: Settings, step: int) -> None:
        """Remember the parameters before the step."""
        if self._step_force is not None and self.acts(rule, settings, step):
            self._step_force.begin()

    def act(self, rule: Rule | None, settings: Settings, step: int, scale: Tensor | None) -> bool:
        """Replace the gradients of heads by the direction of the rule.

        Args:
            rule: the rule of this step; None only measures.
            settings: the settings of the handle.
            step: optimizer steps taken so far.
            scale: the loss scale in the gradients.

        Returns:
            False if no head has a gradient.
        """
        is_captured = is_capturing()
        applied = rule if self._step_force is None else self._step_force.gradient_rule
        if applied is not None and is_captured:
            applied = applied.acting_always()
        draws_noise = settings.noise_in == "gradient"
        rates = self.learning_rates(rule) if draws_noise else {}
        inputs = StepInputs(applied, step, rates, scale, _measures(rule, settings, step), draws_noise)
        is_ascending = ascends(self._optimizer)
        if is_ascending:
            _negate(ascended_gradients(self._optimizer))  # rules descend: they expect gradients of what is minimised
        try:
            measured = None if is_captured else self._repeat_last_step(inputs)
            if measured is None and (update := self._updates.choose(self._optimizer)) is not None:
                measured = update.run(inputs)
                self._trained = [[*entry["params"]] for entry in self._optimizer.param_groups]
        finally:
            if is_ascending:
                _negate(ascended_gradients(self._optimizer))  # looked up again: sharded gradients may be replaced
        if measured is None:
            return False
        if self._step_force is not None:
            self._step_force.select()
            measured = self._step_force.corrected(measured, step)
        elif measured and rule is not None and rule.act_every > 1 and not is_captured:
            measured = per_step(measured, rule.act_every)
        if measured:
            self._measurements.add(measured, step, due=inputs.measure)
        return True

    def finish(self, rule: Rule | None, settings: Settings, step: int) -> None:
        """Add repulsion and noise that are not part of the gradients to the parameters, after the optimizer's step."""
        if self._logits is not None:  # not earlier: a closure may run the model several times in one step
            self._logits.expect(step + 1)
        if self._step_force is not None and self.acts(rule, settings, step):
            self._step_force.add(step)
        noise_in, update = settings.noise_in, self._updates.current
        if noise_in == "gradient" or rule is None or not rule.has_noise or update is None:
            return
        if noise_in == "parameter":
            update.add_noise(rule, self.learning_rates(rule), step=step)
        elif noise_in == "optimizer":
            update.add_step_noise(rule, self._optimizer, step=step)

    def learning_rates(self, rule: Rule | None) -> dict[int, float]:
        """Map each parameter id to its learning rate; empty for a rule without noise, which needs no learning rate."""
        if rule is None or not rule.has_noise:
            return {}
        return self._rates.current(type(rule).__name__)

    def _repeat_last_step(self, inputs: StepInputs) -> list[Measured] | None:
        """Run the last update again without looking up parameters, and return its measurement.

        Returns:
            None, with nothing done, if parameters have to be looked up.
        """
        updates = self._updates
        if updates.current is None or not updates.covers_all:
            return None
        trained = [entry["params"] for entry in self._optimizer.param_groups]
        return updates.current.again(inputs) if are_same(trained, self._trained) else None


@torch.no_grad()
def _negate(gradients: list[Tensor]) -> None:
    for gradient in gradients:
        gradient.neg_()


def _measures(rule: Rule | None, settings: Settings, step: int) -> bool:
    """Check whether this step is the first to act since a measurement was due."""
    return step % settings.measure_every < (1 if rule is None else rule.act_every)
