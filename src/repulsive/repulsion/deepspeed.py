"""Refuse the optimizers of DeepSpeed, which train flattened copies of the weights."""

from __future__ import annotations

from repulsive.errors import OptimizerError

_PACKAGE = "deepspeed.runtime."  # `deepspeed.ops` has ordinary torch optimizers


def refuse_zero(*objects: object) -> None:
    """Raise an error for an optimizer of DeepSpeed, or for an engine that has one. DeepSpeed is not imported.

    ZeRO (stages 1 to 3) and DeepSpeed's 16-bit optimizers flatten the weights, split them over ranks, and step on the
    pieces. The parameters of the model then have no gradients when the torch optimizer steps.

    Args:
        objects: an optimizer and a model, as they were passed to `repel`.

    Raises:
        OptimizerError: one of them is, or holds, an optimizer of DeepSpeed.
    """
    for one in objects:
        for optimizer in (one, getattr(one, "optimizer", None)):
            kinds = type(optimizer).__mro__
            if any(kind.__module__.startswith(_PACKAGE) and "Optimizer" in kind.__name__ for kind in kinds):
                raise OptimizerError(
                    f"{type(optimizer).__name__} of DeepSpeed trains flattened pieces of weights, in which heads have "
                    "no gradients of their own; use ZeRO stage 0, or FSDP2 (fully_shard) instead of DeepSpeed"
                )
