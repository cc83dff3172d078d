"""What `repel` gives back: the attached rule, its state and what it measured."""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from repulsive.errors import OptimizerError, StateError
from repulsive.heads.layout import HeadGroup
from repulsive.particles.rule import Rule
from repulsive.repulsion.clipping import clip
from repulsive.repulsion.live import Live, are_same
from repulsive.repulsion.logits.update import LogitRepulsion
from repulsive.repulsion.measurements import GroupReport, Measurements
from repulsive.repulsion.optimizers import Snapshot, is_nested, scale_of, skips
from repulsive.repulsion.owners import claimed_twice
from repulsive.repulsion.settings import Settings
from repulsive.repulsion.show import Overview, as_html, as_text, overview, short_rule

FORMAT = 1

# Weak on both sides: a handle holds its optimiser, and lives as long as the optimiser's hooks do.
_attached: weakref.WeakKeyDictionary[Optimizer, weakref.WeakSet[Handle]] = weakref.WeakKeyDictionary()


class Handle:
    """A rule attached to the heads of a model and to its optimiser. Made by `repel`, removed by `remove` or `with`."""

    def __init__(
        self,
        groups: list[HeadGroup],
        optimizer: Optimizer,
        rule: Rule | None,
        settings: Settings,
        logits: LogitRepulsion | None = None,
        untrained: Sequence[HeadGroup] = (),
    ) -> None:
        self.groups = groups
        self.optimizer = optimizer
        self.rule = rule
        self.settings = settings
        self.steps = 0  # real optimiser steps taken with the rule
        self.scaler: GradScaler | None = None  # of the loop, for `apply`
        self._applied = False  # `apply` changed this step's gradients already
        self._pending = False  # gradients are changed and the optimiser has not stepped yet
        self._changes = 0  # times that gradients were changed
        self._measurements = Measurements(groups, optimizer, rule, untrained)
        self._hooks: list[RemovableHandle] = []
        self._logits = logits  # layers, tokens and forces, for a rule that reads tokens
        self._live = Live(groups, settings.seed) if logits is None else Live(groups, settings.seed, logits.update)
        self._trained: list[list[Tensor]] = []  # what the optimiser had at the last step

    # -- attaching ----------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Register with the optimiser, unless registered already."""
        if self.attached:
            return
        others = [h for h in handles_of(self.optimizer) if h is not self and h.attached]
        if twice := claimed_twice([*(group for h in others for group in h.groups), *self.groups]):
            raise OptimizerError(
                f"{twice[1]}: this optimiser repels it already; call remove() on the other handle first"
            )
        if others and any(h.settings.max_norm is not None for h in (self, *others)):
            raise OptimizerError(
                "another handle is attached to this optimiser, and each would clip all of its gradients: clip with "
                "torch.nn.utils.clip_grad_norm_ in the loop instead of max_norm, or repel all heads by one handle"
            )
        self._rates()  # fails here rather than in the first step
        self._hooks = [
            self.optimizer.register_step_pre_hook(_uncompiled(self._before_step)),
            self.optimizer.register_step_post_hook(_uncompiled(self._after_step)),
        ]
        if self._logits is not None:
            self._logits.attach()
            self._logits.expect(self.steps)
        _attached.setdefault(self.optimizer, weakref.WeakSet()).add(self)

    @property
    def attached(self) -> bool:
        """Whether the optimiser will call the rule; hooks vanish when an optimiser is pickled or copied."""
        registered = getattr(self.optimizer, "_optimizer_step_pre_hooks", {})
        return any(hook.id in registered for hook in self._hooks)

    def remove(self) -> None:
        """Detach: training goes on as if `repel` had never been called. Warns if no step was ever changed."""
        if self._hooks and self.steps == 0:
            warnings.warn("repulsion was attached, but the optimiser never took a step with it", stacklevel=2)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._logits is not None:
            self._logits.remove()
        _attached.get(self.optimizer, weakref.WeakSet()).discard(self)

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with warnings.catch_warnings():
            if error is not None:
                warnings.simplefilter("ignore")  # the error says more than the warning would
            self.remove()

    # -- one step -----------------------------------------------------------------------------------------------

    def apply(self, scaler: GradScaler | None = None) -> None:
        """Change the gradients now, instead of inside the next `optimizer.step()`: for loops that clip afterwards.

        Once a step, after its last backward pass: called again it changes what it has changed. Where a step does not
        follow (a bad batch), call it after the next backward pass, too: a plain `step` takes gradients for changed.

        Args:
            scaler: that multiplied the loss, where gradients may not be unscaled yet; `repel_prepared` and Lightning's
                callback know theirs.

        Raises:
            OptimizerError: the handle is not attached, having been removed, or its optimiser is a copy.
        """
        if not self.attached:
            raise OptimizerError("this handle is not attached to its optimiser (any more); attach() it, or repel anew")
        self._pending = False
        self._repel(scale_of(scaler or self.scaler, self.optimizer))
        self._applied = self._pending

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Runs before every `optimizer.step`; with a closure, gradients exist only after the closure has run."""
        if skips(optimizer):
            self._applied = self._pending = False
            return None
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": self._wrap(kwargs["closure"])}
        for position, argument in enumerate(args):
            if callable(argument) and not isinstance(argument, Optimizer):
                return (*args[:position], self._wrap(argument), *args[position + 1 :]), kwargs
        if not self._applied and not (self._pending and is_nested(optimizer)):
            self._repel()
        return None

    def _wrap(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def closure_then_repel() -> Any:
            before = Snapshot(self._live.gradients()) if self._applied else None
            changes = self._changes
            loss = closure()  # makes gradients anew, each time it is called; or leaves those that `apply` changed
            left = before is not None and before.is_of(self._live.gradients())
            # A closure that clips may call `apply`, one may wrap another that repels, and any may call `remove`.
            if not left and self._changes == changes and self._hooks:
                self._repel()
            return loss

        return closure_then_repel

    def _repel(self, scale: Tensor | None = None) -> None:
        if scale is None and self._repeats():
            self._changes += 1
            self._pending = True
            return
        settings, update = self.settings, self._live.choose(self.optimizer)
        scale = getattr(self.optimizer, "grad_scale", None) if scale is None else scale
        if update is None:
            if settings.max_norm is not None:  # of heads none has a gradient, others may
                clip(self.optimizer, settings.max_norm, scale)
            return
        if settings.max_norm is not None and settings.order == "clip-repel":
            clip(self.optimizer, settings.max_norm, scale)
        due = self.steps % settings.measure_every == 0
        measured = update.run(
            self.rule,
            self._rates(),
            step=self.steps,
            scale=scale,
            measure=due,
            draw_noise=settings.noise_in == "gradient",
        )
        self._measurements.add(measured, self.steps, due=due)
        if settings.max_norm is not None and settings.order == "repel-clip":
            clip(self.optimizer, settings.max_norm, scale)
        self._changes += 1
        self._pending = True

    def _repeats(self) -> bool:
        """Nearly every step is like the one before: then it is done by one replay, and nothing is looked up."""
        live, settings, optimizer = self._live, self.settings, self.optimizer
        last = live.current
        if last is None or not live.whole or settings.max_norm is not None:
            return False
        if self.steps % settings.measure_every == 0 or getattr(optimizer, "grad_scale", None) is not None:
            return False
        trained = [entry["params"] for entry in optimizer.param_groups]
        if not are_same(trained, self._trained):
            self._trained = [[*some] for some in trained]
            return False
        return last.again(self.rule)

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the step; noise meant for parameters goes in here."""
        if not self._pending:
            return
        update = self._live.current
        if self.settings.noise_in == "parameter" and self.rule is not None and update is not None:
            update.add_noise(self.rule, self._rates(), step=self.steps)
        self.steps += 1
        self._applied = self._pending = False

    def _rates(self) -> dict[int, float]:
        """Learning rate by id of parameter; only noise asks for it."""
        if self.rule is None or not self.rule.has_noise:
            return {}
        if any(entry.get("lr") is None for entry in self.optimizer.param_groups):
            raise OptimizerError(
                f"{type(self.optimizer).__name__} has parameters without a learning rate (lr), by which the noise of "
                f"{type(self.rule).__name__} is scaled; give it one, or take a rule without noise"
            )
        return {id(p): float(entry["lr"]) for entry in self.optimizer.param_groups for p in entry["params"]}

    # -- looking ------------------------------------------------------------------------------------------------

    def report(self) -> list[GroupReport]:
        """One line per group: |drive|, |repulsion|, their ratio, bandwidth, mean distance, as last measured."""
        return self._measurements.report(self._live.skipped)

    def first_report(self) -> list[GroupReport]:
        """The same as first measured, since this handle was made."""
        return self._measurements.first_report(self._live.skipped)

    def __repr__(self) -> str:
        return f"<repulsive.Handle: {self._title()}>"

    def __str__(self) -> str:
        """Rule and step; ratio and similarity of heads at the start and now."""
        return as_text(self._title(), self._overviews())

    def _repr_html_(self) -> str:
        return as_html(self._title(), self._overviews())

    def _title(self) -> str:
        state = "" if self.attached else ", not attached"
        return f"{short_rule(self.rule)}, {len(self.groups)} groups of heads, step {self.steps}{state}"

    def _overviews(self) -> dict[str, Overview]:
        if not self._measurements:
            return {}
        return {"start": overview(self.first_report()), "now": overview(self.report())}

    # -- saving -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: plain numbers and strings, so JSON can hold it.

        With `space="logits"`, between two computations of the force, "forces" has the tensors in use. They may be left
        out: a run that is resumed without them computes new ones.
        """
        state: dict[str, Any] = {
            "format": FORMAT,
            "steps": self.steps,
            "seed": self.settings.seed,
            "rule": _name(self.rule),
            "groups": [[group.name, group.num_heads, group.dim] for group in self.groups],
        }
        if self._logits is not None and (forces := self._logits.state(self.steps)):
            state["forces"] = forces
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, and attach again if the optimiser has lost its hooks.

        Raises:
            StateError: the state is of another version, or of other groups.
        """
        if state.get("format") != FORMAT:
            raise StateError(f"state has format {state.get('format')!r}; this version reads format {FORMAT}")
        saved = [tuple(entry) for entry in state["groups"]]
        own = [(group.name, group.num_heads, group.dim) for group in self.groups]
        if saved != own:
            difference = [str(entry) for entry in sorted(set(saved) ^ set(own))] or ["their order"]
            raise StateError(f"state belongs to other groups of heads; they differ in {', '.join(difference[:4])}")
        if state["rule"] != _name(self.rule):
            warnings.warn(f"resuming with {self.rule}, but the state was made with {state['rule']}", stacklevel=2)
        self.settings = replace(self.settings, seed=int(state["seed"]))
        self._live.forget(self.settings.seed)
        self.steps = int(state["steps"])
        if self._logits is not None:
            self._logits.load(state.get("forces", {}), self.steps)
        self._applied = self._pending = False
        self.attach()


def handles_of(optimizer: Optimizer) -> Iterable[Handle]:
    """The handles attached to an optimiser."""
    return tuple(_attached.get(optimizer, ()))


def _uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook at which a compiled training step breaks its graph: what it does depends on addresses and on the host."""
    disabled = torch.compiler.disable(hook)

    def call(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return disabled(optimizer, args, kwargs)
        return hook(optimizer, args, kwargs)  # without the time that `disabled` takes

    return call


def _name(rule: Rule | None) -> str:
    """A rule's text without the addresses of functions in it, so that two runs of one script agree."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(rule))
