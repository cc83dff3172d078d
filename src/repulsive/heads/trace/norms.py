"""Norms between a projection and attention, with their statistics held constant.

A norm over the full width ties every head to every other through its mean and variance. That tie scales heads but
does not move features between them, so the trace treats it as a constant, and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

STATISTICS = ("mean", "var", "std", "norm", "rsqrt", "linalg_vector_norm")
NORMS = ("layer_norm", "rms_norm")


class Hold(torch.autograd.Function):
    """Identity forward, no gradient backward. The node stays in the graph so that a walk can see what was held."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, width: int) -> Tensor:
        ctx.width = width
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


def hold(x: Tensor, width: int) -> Tensor:
    """`x` as a constant; `width` is how many features it was computed from."""
    held: Tensor = Hold.apply(x, width)  # type: ignore[no-untyped-call]
    return held


def constant_norm(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """layer_norm or rms_norm with its statistics held constant."""
    names = (
        ("input", "normalized_shape", "weight", "bias", "eps")
        if name == "layer_norm"
        else ("input", "normalized_shape", "weight", "eps")
    )
    given = dict(zip(names, args, strict=False)) | kwargs
    x: Tensor = given["input"]
    result: Tensor = func(*args, **kwargs)
    if not x.requires_grad:
        return result
    shape = given["normalized_shape"]
    axes = tuple(range(x.ndim - (1 if isinstance(shape, int) else len(shape)), x.ndim))
    width = int(x.shape[-1])
    centred = x - hold(x.mean(axes, keepdim=True), width) if name == "layer_norm" else x
    eps = given.get("eps")
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    scaled = centred * hold((centred.square().mean(axes, keepdim=True) + eps).rsqrt(), width)
    if given.get("weight") is not None:
        scaled = scaled * given["weight"]
    if given.get("bias") is not None:
        scaled = scaled + given["bias"]
    return scaled.to(result.dtype)


def constant_statistic(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Tensor:
    """Statistics over the last axis, as hand-written norms compute them, are constants; pooling over tokens is not."""
    x = args[0] if args else None
    if not isinstance(x, Tensor) or not result.requires_grad:
        return result
    last = result.ndim == x.ndim and result.shape[-1] == 1 and result.shape[:-1] == x.shape[:-1]
    return hold(result, int(x.shape[-1])) if last or name == "rsqrt" else result
