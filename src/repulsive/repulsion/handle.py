"""The handle that `repel` returns: it runs the rule in optimizer steps, measures, reports, and saves its state."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Never, Self

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from repulsive.errors import OptimizerError, StateError, warn_user
from repulsive.heads.describe import count_of
from repulsive.heads.layout import HeadGroup
from repulsive.particles.rule import Rule
from repulsive.particles.svgd import SVGD
from repulsive.repulsion import checks
from repulsive.repulsion.active_updates import ActiveUpdates
from repulsive.repulsion.backends.choose import Update
from repulsive.repulsion.clipping import clip
from repulsive.repulsion.cuda_graphs import is_capturing
from repulsive.repulsion.display import Overview, as_html, as_text, overview, short_rule
from repulsive.repulsion.late_heads import LateHeads
from repulsive.repulsion.logits.repulsion import LogitRepulsion
from repulsive.repulsion.logits.update import LogitUpdate
from repulsive.repulsion.measurements import GroupReport, Measurements
from repulsive.repulsion.noise_place import check_noise
from repulsive.repulsion.optimizers import current_loss_scale
from repulsive.repulsion.overlap import find_overlap
from repulsive.repulsion.rule_step import RuleStep
from repulsive.repulsion.saved_state import FORMAT, check_state, differing_rule, group_facts, rule_text
from repulsive.repulsion.settings import Settings
from repulsive.repulsion.step_force import StepForce, check_step_force
from repulsive.repulsion.step_hooks import StepHooks

# Weak keys and values: a handle refers to its optimizer, and lives as long as the optimizer's hooks.
_attached: weakref.WeakKeyDictionary[Optimizer, weakref.WeakSet[Handle]] = weakref.WeakKeyDictionary()


class Handle:
    """A rule attached to the heads of a model and to its optimizer.

    `repel` creates it; `remove`, or the end of a `with` block, detaches it.

    Args:
        groups: the heads that the rule acts on.
        optimizer: the torch optimizer that trains them.
        rule: the rule; None only measures.
        settings: the arguments of `repel` that do not select heads.
        late: detects heads that join the training later.
        logits: layers, tokens and forces, for a rule that reads tokens.
    """

    def __init__(
        self,
        groups: list[HeadGroup],
        optimizer: Optimizer,
        rule: Rule | None,
        settings: Settings,
        late: LateHeads,
        logits: LogitRepulsion | None = None,
    ) -> None:
        self.groups = groups
        self.optimizer = optimizer
        self._rule = rule
        self.settings = settings
        self.steps = 0  # optimizer steps that updated parameters with the rule
        self.scaler: GradScaler | None = None  # gradient scaler of the training loop, for `apply`
        self._late = late
        self._measurements = Measurements(groups, rule)
        self._start: Overview | None = None  # the first measurement, also of a run that was resumed
        self._logits = logits
        self._updates = ActiveUpdates(groups, settings.seed, Update if logits is None else partial(LogitUpdate, logits))
        self._hooks = StepHooks(optimizer, self._updates.gradients)
        step_force = None
        if settings.force_in == "step":
            check_step_force(rule, groups)
            assert isinstance(rule, SVGD)
            step_force = StepForce(groups, rule)
        self._rule_step = RuleStep(optimizer, self._updates, self._measurements, step_force, logits)

    @property
    def rule(self) -> Rule | None:
        """The rule; None only measures. Another rule may be assigned between two steps.

        Raises:
            RuleError: when a rule is assigned that this handle was not made for, such as one with `space="logits"`.
        """
        return self._rule

    @rule.setter
    def rule(self, rule: Rule | None) -> None:
        checks.check_new_rule(self._rule, rule, self.settings)
        self._rule = self._measurements.rule = rule

    # -- attaching ----------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Register hooks with the optimizer, unless they are registered already.

        Raises:
            OptimizerError: another handle repels the same heads or clips the same gradients, or the noise cannot follow
                the steps of this optimizer.
        """
        if self.attached:
            return
        others = [h for h in handles_of(self.optimizer) if h is not self and h.attached]
        if overlap := find_overlap([*(group for h in others for group in h.groups), *self.groups]):
            raise OptimizerError(
                f"{overlap[1]}: this optimizer already repels these heads; call remove() on the other handle first"
            )
        if others and any(h.settings.max_norm is not None for h in (self, *others)):
            raise OptimizerError(
                "another handle is attached to this optimizer, and each would clip all of its gradients: clip with "
                "torch.nn.utils.clip_grad_norm_ in the loop instead of max_norm, or repel all heads with one handle"
            )
        self._rule_step.learning_rates(self.rule)  # an error here is better than one in the first step
        if self.settings.noise_in == "optimizer" and self.rule is not None and self.rule.has_noise:
            check_noise(self.rule, self.optimizer)
        self._hooks.register(self._repel, self._finish_step, self._begin_step)
        if self._logits is not None:
            self._logits.attach()
            self._logits.expect(self.steps)
        _attached.setdefault(self.optimizer, weakref.WeakSet()).add(self)

    @property
    def attached(self) -> bool:
        """Whether the optimizer will call the rule. Hooks are lost when an optimizer is pickled or copied."""
        return self._hooks.is_registered

    def remove(self) -> None:
        """Detach from the optimizer: training continues without the rule.

        Warns if no step was taken with it, or if repulsion was stronger than the loss; see `warn_of_strength`.
        """
        if self._hooks.was_registered and self.steps == 0:
            warn_user("repulsion was attached, but the optimizer never took a step with it")
        self.warn_of_strength()
        self._hooks.remove()
        if self._logits is not None:
            self._logits.remove()
        _attached.get(self.optimizer, weakref.WeakSet()).discard(self)

    def warn_of_strength(self) -> None:
        """Warn, once, if repulsion was stronger than the loss at the end of a training, which may be a short one."""
        self._measurements.finish(self.steps)

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with warnings.catch_warnings():
            if error is not None:
                warnings.simplefilter("ignore")  # the error is reported already
            self.remove()

    # -- one step -----------------------------------------------------------------------------------------------

    def apply(self, scaler: GradScaler | None = None) -> None:
        """Change the gradients now instead of inside the next `optimizer.step()`, for loops that clip afterwards.

        Call it once per step, after the last backward pass; a second call would apply the rule to its own result. If no
        step follows (a bad batch), call it after the next backward pass as well: the next `step` assumes that gradients
        are changed already.

        Args:
            scaler: the gradient scaler of the loss, if gradients may not be unscaled yet; `repel_prepared` and
                Lightning's callback set theirs.

        Raises:
            OptimizerError: the handle was removed, or its optimizer is a copy.
        """
        if not self.attached:
            raise OptimizerError("this handle is not attached to its optimizer; call attach(), or repel again")
        self._begin_step()
        self._hooks.apply(self._repel, current_loss_scale(scaler or self.scaler, self.optimizer))

    def _begin_step(self) -> None:
        """Remember what the rule needs from before the step."""
        self._rule_step.begin(self.rule, self.settings, self.steps)

    def _repel(self, scale: Tensor | None) -> bool:
        """Replace the gradients of heads by the direction of the rule, and clip if `max_norm` is set.

        Args:
            scale: the loss scale in the gradients, if the optimizer does not know it.

        Returns:
            Whether the step counts: False if no head has a gradient.
        """
        settings, optimizer = self.settings, self.optimizer
        scale = getattr(optimizer, "grad_scale", None) if scale is None else scale
        if settings.max_norm is not None and settings.order == "clip-repel":
            clip(optimizer, settings.max_norm, scale)
        if self._rule_step.acts(self.rule, settings, self.steps):
            is_counted = self._rule_step.act(self.rule, settings, self.steps, scale)
        else:
            is_counted = self._rule_step.skip(self.rule, self.steps)
        if settings.max_norm is not None and settings.order == "repel-clip":
            clip(optimizer, settings.max_norm, scale)  # other parameters may have gradients even if no head has one
        return is_counted

    def _finish_step(self) -> None:
        """Count the step, and add repulsion and noise that are not part of the gradients."""
        rule = self.rule
        self._rule_step.finish(rule, self.settings, self.steps)
        if self._late.may_have_joined() and not (rule is not None and rule.is_off(self.steps)) and not is_capturing():
            self._late.warn([group for handle in handles_of(self.optimizer) for group in handle.groups])
        self.steps += 1

    # -- reports ------------------------------------------------------------------------------------------------

    def report(self) -> list[GroupReport]:
        """Return the last measurement of each group: |drive|, |repulsion|, their ratio, similarity, and more."""
        return self._measurements.report(self._updates.skipped)

    def first_report(self) -> list[GroupReport]:
        """Return the first measurement of each group since this handle was created or a state was loaded."""
        return self._measurements.first_report(self._updates.skipped)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return this handle: a copied model refers to the handle of the original, which belongs to its optimizer.

        Raises:
            StateError: the handle itself is copied, or its optimizer is copied with it.
        """
        if not memo or id(self.optimizer) in memo:
            self.__reduce_ex__(None)
        return self

    def __reduce_ex__(self, protocol: object) -> Never:
        """Refuse to be pickled or copied: a handle belongs to one optimizer, which calls it.

        Raises:
            StateError: always.
        """
        raise StateError(
            "a handle cannot be pickled or copied, because it belongs to one optimizer: save handle.state_dict(), and "
            "load it into the handle that repel(model, optimizer) returns for the loaded or copied model. Keep the "
            "handle out of objects that are pickled, such as the model"
        )

    def __repr__(self) -> str:
        return f"<repulsive.Handle: {self._title()}>"

    def __str__(self) -> str:
        """Format the rule, the step, and the ratio and similarity of heads at the start and now."""
        return as_text(self._title(), self._overviews())

    def _repr_html_(self) -> str:
        return as_html(self._title(), self._overviews())

    def _title(self) -> str:
        is_off = self.rule is not None and self.rule.is_off(self.steps)
        weight = "ratio" if self.rule is not None and self.rule.holds_ratio else "alpha"
        state = (f", {weight} is 0 now" if is_off else "") + ("" if self.attached else ", not attached")
        kind = "heads" if all(group.is_attention for group in self.groups) else "particles"
        return f"{short_rule(self.rule)}, {count_of(len(self.groups), 'group')} of {kind}, step {self.steps}{state}"

    def _overviews(self) -> dict[str, Overview]:
        now = {"now": overview(self.report())} if self._measurements.has_last else {}
        return now if (start := self._first_overview()) is None else {"start": start} | now

    def _first_overview(self) -> Overview | None:
        """Return the first measurement of the run; None before it. Only the first call waits for the device."""
        if self._start is None and self._measurements.has_first:
            self._start = overview(self.first_report())
        return self._start

    # -- saving -------------------------------------------------------------------------------------------------

    def state_dict(self, *, tensors: bool = True) -> dict[str, Any]:
        """Return the state that a resumed run needs, as plain numbers and strings that JSON can hold.

        With `space="logits"`, between two computations of the force, the entry "forces" has the tensors in use. It may
        be left out: a run that is resumed without it computes new forces.

        Args:
            tensors: if False, leave out "forces".
        """
        start = self._first_overview()
        state: dict[str, Any] = {
            "format": FORMAT,
            "steps": self.steps,
            "seed": self.settings.seed,
            "rule": rule_text(self.rule),
            "groups": group_facts(self.groups),
            # Always there, and a list: distributed checkpoints need the same keys when they are loaded.
            "start": None if start is None else start.state(),
        }
        if tensors and self._logits is not None and (forces := self._logits.state(self.steps)):
            state["forces"] = forces
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state, and attach again if the optimizer has lost its hooks. Measurements start anew.

        Raises:
            StateError: the state has another format, or belongs to other groups.
        """
        check_state(state, self.groups)
        if (saved := differing_rule(state, self.rule)) is not None:
            warn_user(f"resuming with {rule_text(self.rule)}, but the state was made with {saved}")
        self.settings = replace(self.settings, seed=int(state["seed"]))
        self._updates.reset(self.settings.seed)
        self.steps = int(state["steps"])
        self._measurements.reset()
        start = state.get("start")  # older states do not have it
        self._start = None if start is None else Overview.from_state(start)
        if self._logits is not None:
            self._logits.load(state.get("forces", {}), self.steps, self.settings.seed)
        self._hooks.reset()
        self.attach()


def handles_of(optimizer: Optimizer) -> Iterable[Handle]:
    """Return the handles attached to an optimizer."""
    return tuple(_attached.get(optimizer, ()))
