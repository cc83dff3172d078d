"""Noise that follows the optimizer's step, for all slices of a fused update in one Triton launch.

`repulsion.optimizer_noise` has the formulas, and is the reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from repulsive.particles.rule import Rule
from repulsive.repulsion.backends.addresses import COLUMNS, DTYPES, SliceTable, send
from repulsive.repulsion.backends.launch_settings import COMBINE, NOISY_BLOCK
from repulsive.repulsion.optimizer_noise import Respond, adam_response, response_of, rmsprop_response, sgd_response

NUMBERS = 8  # per slice; see `triton_kernels.step_noise`


class Plan(NamedTuple):
    """What the launch needs to know about one parameter.

    Args:
        numbers: numbers of the optimizer, in the order in which the launch reads them.
        square: second moment; None for SGD.
        buffer: momentum buffer; None without one.
        steps: number of steps, if it is on the device.
    """

    numbers: tuple[float, ...]
    square: Tensor | None
    buffer: Tensor | None
    steps: Tensor | None = None


class FusedStepNoise:
    """Noise after a step of the optimizer for the slices of one table.

    Args:
        table: the table of slices; not of heads in several modules.
        heads: number of heads of a group.
        padded: the same, padded to a power of two.
        splits: number of programs per slice.
    """

    def __init__(self, table: SliceTable, heads: int, padded: int, splits: int) -> None:
        self._table, self._heads, self._padded, self._splits = table, heads, padded, splits
        slices, device = len(table.parts), table.device
        self._pointers = torch.zeros(slices, 4, dtype=torch.int64, device=device)
        self._numbers = torch.zeros(slices, NUMBERS, dtype=torch.float64, device=device)
        self._steps = torch.zeros(1, dtype=torch.int64, device=device)
        self._sent: tuple[list[int], list[float]] = ([], [])

    def add(self, rule: Rule, optimizer: Optimizer, *, step: int) -> bool:
        """Add the noise of a rule to weights and momentum buffers.

        Returns:
            False, with nothing done, if the state of the optimizer does not fit the launch.
        """
        respond = response_of(optimizer)
        plans = self._plans(rule.noise_scale(1.0), optimizer, respond)
        if plans is None:
            return False
        self._send(plans)
        self._steps.fill_(step)
        self._launch(respond, plans)
        return True

    def _plans(self, scale: float, optimizer: Optimizer, respond: Respond | None) -> list[Plan] | None:
        """Return the plan of each parameter; None if one does not fit."""
        entries = {id(parameter): entry for entry in optimizer.param_groups for parameter in entry["params"]}
        plans = []
        for parameter in self._table.parameters:
            plan = _plan(scale, respond, entries[id(parameter)], optimizer.state[parameter])
            if plan is None or not all(_fits(one, parameter) for one in (plan.square, plan.buffer) if one is not None):
                return None
            plans.append(plan)
        tensors = [tensor for plan in plans for tensor in (plan.square, plan.buffer) if tensor is not None]
        is_uniform = len({plan.buffer is None for plan in plans}) == 1 and len({t.dtype for t in tensors}) <= 1
        return plans if is_uniform else None

    def _send(self, plans: list[Plan]) -> None:
        """Send addresses and numbers to the device, if they have changed."""
        table = self._table
        addresses, numbers = [], []
        for index, offset in zip(table.parameter_of, table.offsets, strict=True):
            parameter, plan = table.parameters[index], plans[index]
            elements = offset // parameter.element_size()
            addresses.append(parameter.data_ptr() + offset)
            for state in (plan.square, plan.buffer):
                addresses.append(0 if state is None else state.data_ptr() + elements * state.element_size())
            addresses.append(0 if plan.steps is None else plan.steps.data_ptr())
            numbers += [*plan.numbers, *[0.0] * (NUMBERS - len(plan.numbers))]
        if addresses != self._sent[0]:
            send(torch.tensor(addresses).view(-1, 4), self._pointers)
        if numbers != self._sent[1]:
            send(torch.tensor(numbers, dtype=torch.float64).view(-1, NUMBERS), self._numbers)
        self._sent = (addresses, numbers)

    def _launch(self, respond: Respond | None, plans: list[Plan]) -> None:
        import triton.language as tl

        from repulsive.repulsion.backends.triton_kernels import step_noise as code

        mode = code.ADAM if respond is adam_response else code.RMSPROP if respond is rmsprop_response else code.SGD
        table, first = self._table, plans[0]
        state = first.square if first.square is not None else first.buffer
        code.step_noise_kernel[(len(table.parts), self._splits)](
            table.rows,
            self._pointers,
            self._numbers,
            self._steps,
            M=self._heads,
            MP=self._padded,
            BLOCK=NOISY_BLOCK[self._padded],
            SPLITS=self._splits,
            COLUMNS=COLUMNS,
            KIND=getattr(tl, DTYPES[table.dtype]),
            STATE=getattr(tl, DTYPES[table.dtype if state is None else state.dtype]),
            FLAT=table.flat,
            MODE=mode,
            BUFFERED=first.buffer is not None,
            num_warps=COMBINE[self._padded]["num_warps"],
        )


def _plan(scale: float, respond: Respond | None, entry: Mapping[str, Any], state: Mapping[str, Any]) -> Plan | None:
    """Make the plan of one parameter; None if the optimizer, or one of its settings, needs the eager noise."""
    lr = entry["lr"]
    numbers: tuple[float, ...]
    if isinstance(lr, Tensor):
        return None
    if lr == 0:
        scale, lr = 0.0, 1.0  # no noise
    if respond is sgd_response:
        response = sgd_response({**entry, "lr": lr}, state)
        deviation = float(response.variance) ** 0.5
        return Plan((scale * deviation, float(response.step), float(response.kept)), None, response.buffer)
    count, on_device = _count(state["step"])
    if respond is adam_response:
        first, second = entry["betas"]
        square = state["max_exp_avg_sq" if entry["amsgrad"] else "exp_avg_sq"]
        numbers = (scale, lr, entry["eps"], _log(first), _log(second), 1 - first, count)
        return Plan(numbers, square, state["exp_avg"], on_device)
    if respond is rmsprop_response and not entry["centered"]:
        momentum = entry["momentum"]
        numbers = (scale, lr, entry["eps"], 0.0, _log(entry["alpha"]), 1 - momentum, count)
        return Plan(numbers, state["square_avg"], state["momentum_buffer"] if momentum else None, on_device)
    return None


def _count(steps: float | Tensor) -> tuple[float, Tensor | None]:
    """Return the number of steps; -1 and its tensor if it is on the device, which the host does not wait for."""
    if isinstance(steps, Tensor) and steps.device.type != "cpu":
        return -1.0, steps
    return float(steps), None


def _log(decay: float) -> float:
    return math.log(decay) if decay > 0 else -math.inf


def _fits(state: Tensor, parameter: Tensor) -> bool:
    """Check whether a tensor of the optimizer lies in memory as its parameter does."""
    return state.stride() == parameter.stride() and state.device == parameter.device and state.dtype in DTYPES
