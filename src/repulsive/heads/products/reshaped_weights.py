"""Follow the reshaped, cast and copied forms of a parameter through a forward pass.

A model may compute with `W.permute(0, 2, 1).reshape(-1, width)` instead of with W itself, and such a copy does not
share its memory with the parameter. The steps that led to it are kept on the copy and repeated on a tensor of element
numbers when needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_CASTS = ("to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone", "detach")
_SHAPES = (
    "permute",
    "transpose",
    "t",
    "movedim",
    "swapaxes",
    "reshape",
    "view",
    "flatten",
    "unflatten",
    "squeeze",
    "unsqueeze",
    "expand",
    "repeat_interleave",
)
_PROPERTIES = tuple(getattr(Tensor, name).__get__ for name in ("T", "mT"))


class _Steps(NamedTuple):
    """A parameter and the calls that gave a tensor its shape: (function, arguments after the tensor, keywords)."""

    parameter: Tensor
    calls: tuple[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]], ...] = ()


def note_reshape(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
    """Mark the result of a torch function if it reshapes, casts or copies a parameter, or a form of one."""
    name = getattr(func, "__name__", "")
    is_cast, is_shape = name in _CASTS, name in _SHAPES or func in _PROPERTIES
    if not (is_cast or is_shape) or not args or not isinstance(result, Tensor) or result is args[0]:
        return
    steps = _steps_of(args[0])
    if steps is not None:
        calls = steps.calls if is_cast else (*steps.calls, (func, args[1:], kwargs))
        result._parameter_steps = _Steps(steps.parameter, calls)  # type: ignore[attr-defined]


def parameter_of(tensor: object) -> Tensor | None:
    """Return the parameter that a tensor is, or is a marked form of; None if there is none."""
    steps = _steps_of(tensor)
    return None if steps is None else steps.parameter


def elements_of(tensor: Tensor) -> Tensor:
    """Return the number of the parameter's element at each place of a parameter or of a form of it, int64."""
    steps = _steps_of(tensor)
    assert steps is not None
    elements = torch.arange(steps.parameter.numel(), device="cpu").view(steps.parameter.shape)
    for func, args, kwargs in steps.calls:
        elements = func(elements, *args, **kwargs)
    return elements


def shape_key(tensor: Tensor) -> str:
    """Return a text that is equal for forms of parameters of equal shape that were made by equal steps."""
    steps = _steps_of(tensor)
    calls = () if steps is None else steps.calls
    return repr(
        [(getattr(func, "__name__", ""), str(func) if func in _PROPERTIES else "", a, k) for func, a, k in calls]
    )


def _steps_of(tensor: object) -> _Steps | None:
    if isinstance(tensor, nn.Parameter):
        return _Steps(tensor)
    steps: _Steps | None = getattr(tensor, "_parameter_steps", None)
    return steps
