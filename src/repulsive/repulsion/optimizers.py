"""Inspect an optimizer and its gradients: nested, skipped and empty steps, unchanged gradients, loss scale, ascent."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import FrameType

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from repulsive.heads.sharded_tensors import is_sharded


class GradientSnapshot:
    """Remember gradients, to detect later whether they were replaced or written to."""

    def __init__(self, gradients: Iterable[Tensor | None]) -> None:
        self._gradients = list(gradients)
        self._versions = _versions(self._gradients)

    def matches(self, gradients: Sequence[Tensor | None]) -> bool:
        """Check whether `gradients` are the remembered tensors with unchanged contents."""
        is_same = all(one is other for one, other in zip(self._gradients, gradients, strict=True))
        return is_same and _versions(gradients) == self._versions


def _versions(gradients: Iterable[Tensor | None]) -> list[int]:
    # FSDP2 adds to the local part of a gradient; the version of the DTensor stays the same.
    return [0 if grad is None else getattr(grad, "_local_tensor", grad)._version for grad in gradients]


def is_nested_step(optimizer: Optimizer) -> bool:
    """Check whether this step runs inside another step of the same optimizer: a subclass that calls `super().step()`.

    Torch runs hooks for the `step` method of both classes. The call stack distinguishes them; a flag would stay set
    after a step that raised.
    """
    hooked = getattr(type(optimizer).step, "__code__", None)
    frame: FrameType | None = sys._getframe()
    depth = 0
    while frame is not None and depth < 2:
        depth += frame.f_code is hooked and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return depth == 2


def will_skip_step(optimizer: Optimizer) -> bool:
    """Check whether a fused optimizer will skip its step because the gradient scaler found infinities."""
    found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(torch.as_tensor(found_inf).item())


def current_loss_scale(scaler: GradScaler | None, optimizer: Optimizer) -> Tensor | None:
    """Return the loss scale that gradients contain; None without a scaler, or after `scaler.unscale_`."""
    if scaler is None or not scaler.is_enabled():
        return None
    is_unscaled = scaler._per_optimizer_states[id(optimizer)]["stage"] is not OptState.READY
    return None if is_unscaled else torch.tensor(scaler.get_scale(), dtype=torch.float32, device="cpu")


def ascends(optimizer: Optimizer) -> bool:
    """Check whether an optimizer maximises for some of its parameters, because their group has `maximize=True`."""
    for entry in optimizer.param_groups:  # noqa: SIM110  `any` with a generator takes twice as long, in every step
        if entry.get("maximize", False):
            return True
    return False


def ascended_gradients(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients that an optimizer ascends, because their parameter group has `maximize=True`."""
    groups = [entry for entry in optimizer.param_groups if entry.get("maximize", False)]
    return [parameter.grad for entry in groups for parameter in entry["params"] if parameter.grad is not None]


def only_initialises_state(optimizer: Optimizer, gradients: Iterable[Tensor | None]) -> bool:
    """Check whether a step only creates the optimizer's state: zero gradients, learning rate 0, and no state yet.

    Distributed checkpoints take such a step with a new optimizer.
    """
    if optimizer.state or not all(_is_zero(entry.get("lr")) for entry in optimizer.param_groups):
        return False
    return all(grad is None or _is_zero_everywhere(grad) for grad in gradients)


def has_nothing_to_follow(parameter: Tensor) -> bool:
    """Check whether a parameter has no gradient, or is frozen with a gradient of zeros.

    A frozen parameter with a nonzero gradient is still trained, by a loop that freezes between backward and step.
    """
    grad = parameter.grad
    return grad is None or (not parameter.requires_grad and _is_zero_everywhere(grad))


def _is_zero(lr: object) -> bool:
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        return False  # reading it would synchronise with the device
    return bool(lr == 0)


def _is_zero_everywhere(grad: Tensor) -> bool:
    """Check whether a gradient is zero on all ranks, so that all ranks make the same decision."""
    if grad.layout != torch.strided:
        return False
    norm = torch.linalg.vector_norm(grad.detach())
    return float(norm.full_tensor() if is_sharded(norm) else norm) == 0
