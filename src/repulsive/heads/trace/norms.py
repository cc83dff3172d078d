"""Norms between a projection and attention, with their statistics held constant.

A norm over the full width makes every head depend on every other head through its mean and variance. These statistics
only shift and scale heads and do not move features between heads, so the trace treats them as constants and its report
says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

STATISTICS = ("mean", "var", "std", "norm", "rsqrt", "linalg_vector_norm")
NORMS = ("layer_norm", "rms_norm")


class StopGradient(torch.autograd.Function):
    """Identity forward, no gradient backward. Its node stays in the autograd graph, so the tracer can find it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, width: int) -> Tensor:
        ctx.width = width
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


def constant(x: Tensor, width: int) -> Tensor:
    """Block the gradient of the statistic `x`; `width` is the number of features that `x` was computed from."""
    result: Tensor = StopGradient.apply(x, width)  # type: ignore[no-untyped-call]
    return result


def constant_norm(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Compute layer_norm or rms_norm with its statistics held constant."""
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
    centred = x - constant(x.mean(axes, keepdim=True), width) if name == "layer_norm" else x
    eps = given.get("eps")
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    scaled = centred * constant((centred.square().mean(axes, keepdim=True) + eps).rsqrt(), width)
    if given.get("weight") is not None:
        scaled = scaled * given["weight"]
    if given.get("bias") is not None:
        scaled = scaled + given["bias"]
    scaled = scaled.to(result.dtype)
    # torch's norms return contiguous tensors, even for transposed inputs; models may rely on it and call view
    return scaled.contiguous() if result.is_contiguous() else scaled


def constant_statistic(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Tensor:
    """Hold a statistic over the last axis constant, as in hand-written norms; leave pooling over tokens as it is."""
    x = args[0] if args else None
    if not isinstance(x, Tensor) or not result.requires_grad:
        return result
    over_last_axis = result.ndim == x.ndim and result.shape[-1] == 1 and result.shape[:-1] == x.shape[:-1]
    return constant(result, int(x.shape[-1])) if over_last_axis or name == "rsqrt" else result
