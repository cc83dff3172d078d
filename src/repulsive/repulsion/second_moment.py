"""Fix the second moment of an optimizer while samples are taken: its steps no longer depend on the weights."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch import Tensor

from repulsive.errors import OptimizerError
from repulsive.heads.sharded_tensors import is_sharded
from repulsive.repulsion.attach import unwrap_optimizer
from repulsive.repulsion.optimizer_noise import adam_response, response_of, rmsprop_response

FIXED = 1 - 2**-23  # decay rate, exact in float32: the second moment changes by a percent in 84,000 steps
_STEPS = 1e12  # a number of steps t for which FIXED ** t is zero
_FLOOR = 0.01  # least second moment, as a share of the mean of its tensor


def fix_second_moment(optimizer: Any) -> None:
    """Keep the second moment of Adam, AdamW or RMSprop at its present value, for samples of SGLD and SPOS.

    Langevin steps may be scaled by any constant, another one for each weight. The second moment is not constant: if it
    averages over few decorrelation times, it is larger where gradients are larger, and samples vary too much
    (`docs/noise.md`). Call this function after the second moment has averaged over enough steps, and drop the
    samples until the weights have forgotten where they were.

    All parameters of the optimizer are affected. The decay rate in its `param_groups` and the number of steps in its
    state change, and are saved with it. Second moments below a hundredth of the mean of their tensor are raised to it,
    because they would allow very large steps. Tensors that never had a gradient start anew when they get one.

    Args:
        optimizer: an optimizer that has taken at least 1 / (1 - beta2) steps (RMSprop: alpha), or a wrapper of it.

    Raises:
        OptimizerError: the optimizer has no second moment, is not supported, has taken too few steps, or its weights
            are sharded.
    """
    optimizer = unwrap_optimizer(optimizer)
    name, is_adam = type(optimizer).__name__, response_of(optimizer) is adam_response
    if not is_adam and response_of(optimizer) is not rmsprop_response:
        raise OptimizerError(f"fix_second_moment supports Adam, AdamW and RMSprop, got {name}")
    states = []
    for entry in optimizer.param_groups:
        decay = entry["betas"][1] if is_adam else entry["alpha"]
        for parameter in entry["params"]:
            if state := optimizer.state.get(parameter):
                _check(name, parameter, float(state["step"]), 1 / (1 - decay))
                states.append((parameter, state, 1 - decay ** float(state["step"])))
    if not states:
        raise OptimizerError(f"{name} has no second moment yet: take steps before fix_second_moment")
    for parameter, state, averaged in states:
        if not _fix(state, averaged if is_adam else 1.0):
            del optimizer.state[parameter]
    for entry in optimizer.param_groups:
        if is_adam:
            entry["betas"] = (entry["betas"][0], FIXED)
        else:
            entry["alpha"] = FIXED


def _check(name: str, parameter: Tensor, steps: float, window: float) -> None:
    if is_sharded(parameter):
        raise OptimizerError("fix_second_moment does not support sharded weights; choose a decay rate closer to 1")
    if steps < window:
        raise OptimizerError(
            f"the second moment of {name} averages over {window:.0f} steps, and a parameter has had {steps:.0f}: take "
            "more steps before fix_second_moment"
        )


def _fix(state: MutableMapping[str, Any], averaged: float) -> bool:
    """Fix the second moment of one parameter; return False, with nothing done, if it is zero.

    Args:
        state: of the optimizer.
        averaged: share of the second moment that is not its start at zero, by which Adam divides it.
    """
    moments: list[Tensor] = [state[key] for key in ("exp_avg_sq", "max_exp_avg_sq", "square_avg") if key in state]
    if not moments[-1].any():
        return False
    for square in moments:
        centre = state["grad_avg"].square() if "grad_avg" in state else 0.0  # centred RMSprop subtracts it
        spread = (square - centre) / averaged
        square.copy_(spread.clamp(min=_FLOOR * float(spread.mean())) + centre)
    state["step"].fill_(_STEPS)
    return True
