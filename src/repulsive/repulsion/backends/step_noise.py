"""Noise that follows the optimizer's step, for all slices of a fused update in one Triton launch.

`repulsion.optimizer_noise` has the formulas, and is the reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from repulsive.particles.rule import Rule
from repulsive.repulsion.backends.addresses import COLUMNS, DTYPES, SliceTable, send
from repulsive.repulsion.backends.graph_cache import GraphCache
from repulsive.repulsion.backends.launch_settings import COMBINE, NOISY_BLOCK
from repulsive.repulsion.backends.optimizer_state import OptimizerState
from repulsive.repulsion.optimizer_noise import Respond, adam_response, rmsprop_response, sgd_response

NUMBERS = 8  # per slice; see `triton_kernels.step_noise`
_SETTINGS = ("lr", "betas", "eps", "alpha", "momentum", "dampening", "nesterov")  # of all supported optimizers


class Form(NamedTuple):
    """What the launch is compiled for, apart from the table of slices."""

    respond: Respond | None
    state: torch.dtype
    is_buffered: bool
    aligned: bool = False


class FusedStepNoise:
    """Noise after a step of the optimizer for the slices of one table.

    A step in which no tensor has moved sends only the numbers of the optimizer that have changed, and replays a CUDA
    graph.

    Args:
        table: the table of slices; not of heads in several modules.
        heads: number of heads of a group.
        padded: the same, padded to a power of two.
        splits: number of programs per slice.
        inner: length of the inner axis of all slices; 0 if they differ.
    """

    def __init__(self, table: SliceTable, heads: int, padded: int, splits: int, inner: int) -> None:
        self._table, self._heads, self._padded, self._splits, self._inner = table, heads, padded, splits, inner
        slices, device = len(table.parts), table.device
        self._state = OptimizerState(table)
        self._form = Form(None, table.dtype, False)
        self._pointers = torch.zeros(slices, 4, dtype=torch.int64, device=device)
        self._numbers = torch.zeros(slices, NUMBERS, dtype=torch.float64, device=device)
        self._columns = self._numbers.unbind(1)
        self._sent: list[tuple[float, ...]] = []  # the columns of `_numbers`
        self._source: object = None  # what they were computed from
        self._no_counts = [0.0] * len(table.parameters)
        self._steps = torch.full((1,), -1, dtype=torch.int64, device=device)
        self._step = -1
        self._graphs = GraphCache(device)

    def add(self, rule: Rule, optimizer: Optimizer, *, step: int) -> bool:
        """Add the noise of a rule to weights and momentum buffers.

        Returns:
            False, with nothing done, if the state of the optimizer does not fit the launch.
        """
        if not self._state.is_current(optimizer) and not self._read_state(optimizer):
            return False
        if not self._set_numbers(rule.noise_scale(1.0), optimizer, step):
            return False
        if step != self._step + 1:
            self._steps.fill_(step - 1)  # the launch adds one
        self._step = step
        self._graphs.run(partial(self._launch, self._form), self._form)
        return True

    def _read_state(self, optimizer: Optimizer) -> bool:
        """Look up the tensors of the optimizer, and send their addresses; return False if they do not fit."""
        state, table = self._state, self._table
        self._source = None
        if not state.read(optimizer):
            return False
        squares, buffers = state.squares, state.buffers
        tensors = squares or buffers
        dtype = table.dtype if tensors is None else tensors[0].dtype
        sizes, rows = (table.dtype.itemsize, dtype.itemsize, dtype.itemsize, 0), []
        for index, offset in zip(table.parameter_of, table.offsets, strict=True):
            elements = offset // table.dtype.itemsize
            rows.append(
                [
                    addresses[index] + elements * size if addresses else 0
                    for addresses, size in zip(state.addresses, sizes, strict=True)
                ]
            )
        aligned = table.divides_by_16 and all(address % 16 == 0 for row in rows for address in row[:3])
        self._form = Form(state.respond, dtype, buffers is not None, aligned)
        send(torch.tensor(rows, device="cpu"), self._pointers)
        return True

    def _set_numbers(self, scale: float, optimizer: Optimizer, step: int) -> bool:
        """Send the numbers of the optimizer that have changed; return False if one of them is on the device."""
        state, entries = self._state, optimizer.param_groups
        settings = [[*map(entries[index].get, _SETTINGS)] for index in state.entries]
        for values in settings:
            if isinstance(values[0], Tensor):
                return False
        ahead = self._no_counts  # optimizer steps before the first one of the handle
        if state.steps is not None and not state.counts_on_device:
            ahead = [count - step for count in state.counts()]
        source = (scale, settings, ahead)
        if source == self._source:
            return True
        keys = [*zip(state.entry_of, ahead, strict=True)]
        rows = {key: _numbers(scale, state, entries[key[0]], key[1]) for key in set(keys)}
        columns = [*zip(*(rows[keys[index]] for index in self._table.parameter_of), strict=True)]
        changed = [index for index, column in enumerate(columns) if not self._sent or column != self._sent[index]]
        if len(changed) <= 2 and all(len(set(columns[index])) == 1 for index in changed):
            for index in changed:
                self._columns[index].fill_(columns[index][0])
        else:
            send(torch.tensor([*zip(*columns, strict=True)], dtype=torch.float64, device="cpu"), self._numbers)
        self._sent, self._source = columns, source
        return True

    def _launch(self, form: Form) -> None:
        import triton.language as tl

        from repulsive.repulsion.backends.triton_kernels import step_noise as code

        modes: dict[Respond | None, int] = {
            adam_response: code.ADAM,
            rmsprop_response: code.RMSPROP,
            sgd_response: code.SGD,
        }
        table = self._table
        self._steps.add_(1)  # on the device, so that replays count as well
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
            STATE=getattr(tl, DTYPES[form.state]),
            FLAT=table.flat,
            INNER=self._inner,
            ALIGNED=form.aligned,
            CHUNKED=form.aligned and table.chunked,
            MODE=modes[form.respond],
            BUFFERED=form.is_buffered,
            num_warps=COMBINE[self._padded]["num_warps"],
        )


def _numbers(scale: float, state: OptimizerState, entry: Mapping[str, Any], ahead: float) -> tuple[float, ...]:
    """Compute the numbers of one parameter, in the order in which the launch reads them."""
    lr = entry["lr"]
    if lr == 0:
        scale, lr = 0.0, 1.0  # no noise
    if state.respond is sgd_response:
        response = sgd_response({**entry, "lr": lr}, {"momentum_buffer": None})
        deviation = float(response.variance) ** 0.5
        return scale * deviation, float(response.step), float(response.kept), 0.0, 0.0, 0.0, 0.0, 0.0
    if state.respond is adam_response:
        first, second = entry["betas"]
        return scale, lr, entry["eps"], _log(first), _log(second), 1 - first, ahead, 0.0
    return scale, lr, entry["eps"], 0.0, _log(entry["alpha"]), 1 - entry["momentum"], ahead, 0.0


def _log(decay: float) -> float:
    return math.log(decay) if decay > 0 else -math.inf
