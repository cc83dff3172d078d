"""Look through autograd functions and checkpoints, which would hide the attention inside them from a trace."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from repulsive.heads.trace.intercept import Intercept
from repulsive.heads.trace.norms import Hold
from repulsive.heads.trace.projections import tensors_in


class _Context:
    """Stands for the `ctx` of a forward that is run as plain code: takes what is saved, and forgets it."""

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
def functions_looked_through(watch: Intercept) -> Iterator[None]:
    """Run the forward of autograd functions with gradients, where there is attention or a projection in it.

    Reentrant checkpointing is such a function. One without attention keeps its own backward. Only the thread that
    entered is affected, and only until the block ends.
    """
    original = torch.autograd.Function.__dict__["apply"]
    here = threading.get_ident()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        plain = original.__get__(None, cls)
        if cls is Hold or threading.get_ident() != here or not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        before = watch.mark()
        result, settled = _run_forward(cls, args, watch)
        if settled or (watch.has_recorded_since(before) and _carries_gradient(result)):
            return result
        watch.rewind(before)
        with watch.inside_opaque(cls.__name__):
            return plain(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


def _run_forward(cls: Any, args: tuple[Any, ...], watch: Intercept) -> tuple[Any, bool]:
    """The forward as plain code, and whether its result must stand because it wrote into its arguments."""
    context = _Context(args)
    separate = cls.setup_context is not torch.autograd.Function.setup_context  # then forward takes no context
    try:
        with watch.with_gradients():
            result = cls.forward(*args) if separate else cls.forward(context, *args)
    except Exception:  # a kernel that needs the real context: its own apply decides
        return None, False
    return result, context.wrote_in_place


def _carries_gradient(result: Any) -> bool:
    return any(tensor.requires_grad for tensor in tensors_in([result]))


@contextmanager
def saved_tensors_kept() -> Iterator[None]:
    """Ignore saved-tensor hooks: checkpoints without reentry would recompute a pass that is not the one traced."""
    hooks = torch.autograd.graph.saved_tensors_hooks
    enter, leave = hooks.__enter__, hooks.__exit__
    hooks.__enter__ = lambda self: None  # type: ignore[method-assign]
    hooks.__exit__ = lambda self, *args: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        hooks.__enter__, hooks.__exit__ = enter, leave  # type: ignore[method-assign]
