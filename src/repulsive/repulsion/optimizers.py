"""What passes through an optimiser's step: gradients made anew or not, steps inside steps, steps that are none."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import FrameType

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from repulsive.repulsion.sharding.parts import is_sharded


class Snapshot:
    """Gradients as they were at one moment."""

    def __init__(self, gradients: Iterable[Tensor | None]) -> None:
        self._gradients = list(gradients)
        self._versions = _versions(self._gradients)

    def is_of(self, gradients: Sequence[Tensor | None]) -> bool:
        """Whether these are the same tensors, and nothing has written into them."""
        same = all(one is other for one, other in zip(self._gradients, gradients, strict=True))
        return same and _versions(gradients) == self._versions


def _versions(gradients: Iterable[Tensor | None]) -> list[int]:
    # FSDP2 adds to the local part of a gradient, unseen by the whole.
    return [0 if grad is None else getattr(grad, "_local_tensor", grad)._version for grad in gradients]


def is_nested(optimizer: Optimizer) -> bool:
    """Whether a step runs inside another of the same optimiser: a subclass that calls `super().step()`.

    Torch hooks the method of both classes. What tells them apart is the stack: a flag would outlive a step that raised.
    """
    hooked = getattr(type(optimizer).step, "__code__", None)
    frame: FrameType | None = sys._getframe()
    depth = 0
    while frame is not None and depth < 2:
        depth += frame.f_code is hooked and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return depth == 2


def skips(optimizer: Optimizer) -> bool:
    """A fused optimiser under a gradient scaler is called even when it will skip: it found infinities."""
    found: Tensor | None = getattr(optimizer, "found_inf", None)
    return found is not None and bool(torch.as_tensor(found).item())


def scale_of(scaler: GradScaler | None, optimizer: Optimizer) -> Tensor | None:
    """What gradients are multiplied with right now; None once `scaler.unscale_` was called, or without a scaler."""
    if scaler is None or not scaler.is_enabled():
        return None
    unscaled = scaler._per_optimizer_states[id(optimizer)]["stage"] is not OptState.READY
    return None if unscaled else torch.tensor(scaler.get_scale())


def only_makes_state(optimizer: Optimizer, gradients: Sequence[Tensor | None]) -> bool:
    """Distributed checkpoints make the state of a new optimiser by a step on zero gradients at learning rate 0."""
    if optimizer.state or not all(_is_zero(entry.get("lr")) for entry in optimizer.param_groups):
        return False
    return all(grad is None or _is_zero_everywhere(grad) for grad in gradients)


def is_idle(parameter: Tensor) -> bool:
    """Whether a parameter has nothing to follow: no gradient, or it was frozen and its gradient is kept as zeros.

    A frozen one with a gradient has just been trained, by a loop that freezes between backward and step.
    """
    grad = parameter.grad
    return grad is None or (not parameter.requires_grad and _is_zero_everywhere(grad))


def _is_zero(lr: object) -> bool:
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        return False  # looking would be a wait for the device
    return bool(lr == 0)


def _is_zero_everywhere(grad: Tensor) -> bool:
    """On all ranks, so that they agree."""
    if grad.layout != torch.strided:
        return False
    norm = torch.linalg.vector_norm(grad.detach())
    return float(norm.full_tensor() if is_sharded(norm) else norm) == 0
