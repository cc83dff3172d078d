"""Hooks that change the gradients of an optimizer exactly once per step, whatever the loop does around the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from repulsive.repulsion.optimizers import GradientSnapshot, is_nested_step, will_skip_step

Change = Callable[[Tensor | None], bool]  # takes the loss scale in the gradients, or None; returns whether it acted
Finish = Callable[[], None]
Begin = Callable[[], None]
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class StepHooks:
    """Hooks of one optimizer: they change gradients before a step, and finish after it.

    A step may have a closure, be skipped by the gradient scaler, run inside another step of the same optimizer, or
    follow a call of `apply`, which has changed the gradients already.

    The functions that change gradients and finish are not kept here, so that a removed handle is freed at once.

    Args:
        optimizer: the optimizer.
        gradients: returns the current gradients of all heads.
    """

    def __init__(self, optimizer: Optimizer, gradients: Callable[[], Sequence[Tensor | None]]) -> None:
        self._optimizer = optimizer
        self._gradients = gradients
        self._hooks: list[RemovableHandle] = []
        self._changes = 0  # number of times that gradients were changed
        self._is_applied = False  # `apply` has changed the gradients of this step
        self._is_pending = False  # gradients are changed, and the optimizer has not stepped yet

    def register(self, change: Change, finish: Finish, begin: Begin = lambda: None) -> None:
        """Register the hooks.

        Args:
            change: called once per step, or after each call of the step's closure, when the gradients exist.
            finish: called after each step with changed gradients.
            begin: called before each step that may change gradients, and before its closure: between two calls of a
                closure the parameters may change.
        """
        self._hooks = [
            self._optimizer.register_step_pre_hook(_uncompiled(self._before_step, change, begin)),
            self._optimizer.register_step_post_hook(_uncompiled(self._after_step, finish)),
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def was_registered(self) -> bool:
        """Whether the hooks were registered and not removed; the optimizer may have lost them."""
        return bool(self._hooks)

    @property
    def is_registered(self) -> bool:
        """Whether the optimizer will call the hooks. They are lost when an optimizer is pickled or copied."""
        registered = getattr(self._optimizer, "_optimizer_step_pre_hooks", {})
        return any(hook.id in registered for hook in self._hooks)

    def reset(self) -> None:
        """Forget that gradients were changed for a step that does not follow."""
        self._is_applied = self._is_pending = False

    def apply(self, change: Change, scale: Tensor | None) -> None:
        """Change the gradients now instead of in the next step."""
        self._is_pending = False
        self._note(change(scale))
        self._is_applied = self._is_pending

    def _note(self, has_acted: bool) -> None:
        if has_acted:
            self._changes += 1
            self._is_pending = True

    def _before_step(
        self, change: Change, begin: Begin, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Arguments | None:
        """Run before every `optimizer.step`. With a closure, gradients exist only after the closure has run."""
        if getattr(optimizer, "found_inf", None) is not None and will_skip_step(optimizer):
            self.reset()
            return None
        if kwargs.get("closure") is not None:
            begin()
            return args, {**kwargs, "closure": self._wrap(kwargs["closure"], change)}
        for position, argument in enumerate(args):
            if callable(argument) and not isinstance(argument, Optimizer):
                begin()
                return (*args[:position], self._wrap(argument, change), *args[position + 1 :]), kwargs
        if not self._is_applied and not (self._is_pending and is_nested_step(optimizer)):
            begin()
            self._note(change(None))
        return None

    def _wrap(self, closure: Callable[[], Any], change: Change) -> Callable[[], Any]:
        def closure_then_change() -> Any:
            applied = GradientSnapshot(self._gradients()) if self._is_applied else None
            changes = self._changes
            loss = closure()
            is_kept = applied is not None and applied.matches(self._gradients())
            # The closure may compute new gradients or keep those that `apply` changed. It may also call `apply`, run
            # another closure that changes gradients, or call `remove`.
            if not is_kept and self._changes == changes and self._hooks:
                self._note(change(None))
            return loss

        return closure_then_change

    def _after_step(self, finish: Finish, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_pending:
            finish()
            self.reset()


def _uncompiled(hook: Callable[..., Any], *functions: Change | Finish | Begin) -> Callable[..., Any]:
    """Exclude a hook, called with functions, from a compiled step: it depends on addresses and on host state."""
    disabled = torch.compiler.disable(hook)

    def call(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return disabled(*functions, optimizer, args, kwargs)
        return hook(*functions, optimizer, args, kwargs)  # `disabled` would cost time in every step

    return call
