"""Trace through autograd functions and checkpoints, which would otherwise hide the attention inside them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from repulsive.heads.trace.norms import StopGradient
from repulsive.heads.trace.projections import tensors_in
from repulsive.heads.trace.recorder import Recorder


class _Context:
    """Stand-in for the `ctx` argument of a forward that runs as plain code; it discards tensors saved for backward."""

    def __init__(self, args: Iterable[Any]) -> None:
        self.needs_input_grad = tuple(isinstance(x, Tensor) and x.requires_grad for x in args)
        self.wrote_in_place = False

    def save_for_backward(self, *tensors: Any) -> None: ...

    def save_for_forward(self, *tensors: Any) -> None: ...

    def mark_non_differentiable(self, *tensors: Any) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...

    def mark_dirty(self, *tensors: Any) -> None:
        self.wrote_in_place = True


@contextmanager
def autograd_functions_traced(recorder: Recorder) -> Iterator[None]:
    """Run the forward of autograd functions as plain code if it contains attention or a projection.

    Reentrant checkpointing is such a function. A function without attention keeps its own backward. Only the current
    thread is affected, and only until the block ends.
    """
    original = torch.autograd.Function.__dict__["apply"]
    thread = threading.get_ident()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        unchanged = original.__get__(None, cls)
        if cls is StopGradient or threading.get_ident() != thread or not torch.is_grad_enabled():
            return unchanged(*args, **kwargs)
        before = recorder.mark()
        result, must_keep = _run_forward(cls, args, recorder)
        if must_keep or (recorder.has_recorded_since(before) and _carries_gradient(result)):
            return result
        recorder.rewind(before)
        with recorder.inside_opaque(cls.__name__):
            return unchanged(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


def _run_forward(cls: Any, args: tuple[Any, ...], recorder: Recorder) -> tuple[Any, bool]:
    """Run the forward as plain code; also return whether it wrote into its arguments, so that a rerun is unsafe."""
    context = _Context(args)
    separate = cls.setup_context is not torch.autograd.Function.setup_context  # then forward takes no ctx
    try:
        with recorder.with_gradients():
            result = cls.forward(*args) if separate else cls.forward(context, *args)
    except Exception:  # it needs the real ctx: use its own apply
        return None, False
    return result, context.wrote_in_place


def _carries_gradient(result: Any) -> bool:
    return any(tensor.requires_grad for tensor in tensors_in([result]))


@contextmanager
def saved_tensors_kept() -> Iterator[None]:
    """Disable saved-tensor hooks: non-reentrant checkpoints would recompute activations and lose the traced tensors."""
    hooks = torch.autograd.graph.saved_tensors_hooks
    enter, leave = hooks.__enter__, hooks.__exit__
    hooks.__enter__ = lambda self: None  # type: ignore[method-assign]
    hooks.__exit__ = lambda self, *args: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        hooks.__enter__, hooks.__exit__ = enter, leave  # type: ignore[method-assign]
