"""Clip gradients before the rule, which bounds the drive, or after it, which bounds the whole update."""

from __future__ import annotations

from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer


def clip(optimizer: Optimizer, max_norm: float, scale: Tensor | None = None) -> Tensor:
    """Scale the gradients of all parameters of an optimizer so that their joint norm is at most `max_norm`.

    Args:
        optimizer: the optimizer whose gradients are clipped.
        max_norm: the largest joint 2-norm.
        scale: the factor in the gradients (loss scaling); the norm is computed without it.

    Returns:
        The norm before clipping.
    """
    parameters = [p for entry in optimizer.param_groups for p in entry["params"]]
    norm: Tensor = get_total_norm([p.grad for p in parameters if p.grad is not None])
    if scale is not None:
        norm = norm / scale
    clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
