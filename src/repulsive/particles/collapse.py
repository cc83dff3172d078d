"""Warn about equal heads, which repulsion cannot separate."""

from __future__ import annotations

import torch
from torch import Tensor

from repulsive.errors import warn_user

EQUAL_HEADS = (
    "all heads of a group are equal, so repulsion is zero until their own gradients separate them (LoRA starts at "
    "zero); with smoothing they stay equal: initialise them with different values, add noise (SPOS) or set smoothing=0"
)
EQUAL_PAIR = (
    "two heads of a group are equal or parallel (cosine 1), so they repel each other little or not at all until their "
    "own gradients separate them: initialise them with different values, or add noise (SPOS)"
)
# A pair of heads with a cosine of at least this counts as equal; cosines from float32 sums are accurate to 1e-7.
EQUAL_COSINE = 1 - 1e-7


class CollapsedHeads(UserWarning):
    """Warning: heads of a group are equal, so repulsion has no direction in which to separate them."""


def warn_if_equal(theta: Tensor) -> None:
    """Warn if all particles of a group are equal; only on a CPU, because it would wait for a GPU.

    Args:
        theta: particles [..., M, D].
    """
    if theta.device.type != "cpu" or theta.shape[-2] == 1 or torch.compiler.is_compiling():
        return
    if bool((theta == theta[..., :1, :]).flatten(-2).all(-1).any()):
        warn_user(EQUAL_HEADS, CollapsedHeads)
