"""Tensors of an optimizer's state that noise after the step reads and writes: where they are, and what has changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from operator import getitem, is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from repulsive.repulsion.backends.addresses import DTYPES, SliceTable
from repulsive.repulsion.optimizer_noise import Respond, adam_response, response_of, rmsprop_response, sgd_response
from repulsive.repulsion.parameter_lookup import are_same

Names = tuple[str | None, str | None]  # names of second moment and momentum buffer in the state of one parameter


class OptimizerState:
    """Second moments, momentum buffers and step counts of the parameters of one table.

    Args:
        table: the table of slices.

    Attributes:
        respond: the formulas of the optimizer.
        entries: indices of the parameter groups that train the parameters of the table.
        entry_of: index of the parameter group of each parameter.
        squares: second moments; None for SGD.
        buffers: momentum buffers; None without momentum.
        steps: step counts, which each optimizer step changes; None for SGD.
        counts_on_device: whether the step counts are on the device, so that the host would have to wait for them.
        addresses: addresses of weights, second moments, momentum buffers, and step counts on the device.
    """

    def __init__(self, table: SliceTable) -> None:
        self._table = table
        self.respond: Respond | None = None
        self.entries: list[int] = []
        self.entry_of: list[int] = []
        self.squares: list[Tensor] | None = None
        self.buffers: list[Tensor] | None = None
        self.steps: list[Tensor] | None = None
        self.counts_on_device = False
        self.addresses: list[list[int]] = []
        self._step_method: object = None
        self._trained: list[list[Tensor]] = []
        self._names: list[Names] = []  # for each of `entries`
        self._columns: list[list[str]] = []  # names of the tensors of each parameter: [kinds of tensors, parameters]
        self._tensors: list[Tensor] = []  # parameters, and their tensors in the order of `_columns`
        self._on_device: list[Tensor] = []  # the tensors of `addresses`
        self._all_addresses: list[int] = []

    def is_current(self, optimizer: Optimizer) -> bool:
        """Check that nothing has changed but the contents of tensors and the settings of the optimizer."""
        groups = optimizer.param_groups
        trained = [entry["params"] for entry in groups]
        if type(optimizer).step is not self._step_method or not are_same(trained, self._trained):
            return False
        for index, names in zip(self.entries, self._names, strict=True):
            if _names(self.respond, groups[index]) != names:
                return False
        try:
            tensors = _tensors(optimizer, self._table.parameters, self._columns)
        except (KeyError, TypeError):  # a parameter has no state
            return False
        if not all(map(is_, tensors, self._tensors)):  # `are_same` may compare step counts by value
            return False
        return [*map(Tensor.data_ptr, self._on_device)] == self._all_addresses

    def read(self, optimizer: Optimizer) -> bool:
        """Look up the state of every parameter.

        Returns:
            False if the optimizer, or one of its settings, needs the eager noise.
        """
        self._step_method = None  # not current
        table = self._table
        self.respond, groups, parameters = response_of(optimizer), optimizer.param_groups, table.parameters
        index_of = {id(parameter): index for index, entry in enumerate(groups) for parameter in entry["params"]}
        if any(id(parameter) not in index_of for parameter in parameters):
            return False
        self.entry_of = [index_of[id(parameter)] for parameter in parameters]
        self.entries = sorted(set(self.entry_of))
        by_entry = {index: _names(self.respond, groups[index]) for index in self.entries}
        names = [name for name in by_entry.values() if name is not None]
        if len(names) < len(by_entry) or len({buffer is None for _, buffer in names}) > 1:
            return False
        self._names, of_parameters = names, [by_entry[index] for index in self.entry_of]
        counted = () if self.respond is sgd_response else (["step"] * len(parameters),)
        by_kind = [[name for name in kind if name is not None] for kind in zip(*of_parameters, strict=True)]
        self._columns = [column for column in (*by_kind, *counted) if column]
        try:
            self._tensors = _tensors(optimizer, parameters, self._columns)
        except (KeyError, TypeError):  # a parameter has no state
            return False
        count = len(parameters)
        columns = iter([self._tensors[start : start + count] for start in range(count, len(self._tensors), count)])
        self.squares = next(columns) if by_kind[0] else None
        self.buffers = next(columns) if by_kind[1] else None
        self.steps = next(columns, None)
        states = [*(self.squares or ()), *(self.buffers or ())]
        if not all(_fits(state, parameters) for state in (self.squares, self.buffers) if state is not None):
            return False
        if len({state.dtype for state in states}) > 1 or not all(isinstance(step, Tensor) for step in self.steps or ()):
            return False
        devices = {(step.device.type, step.dtype) for step in self.steps or ()}
        self.counts_on_device = any(device != "cpu" for device, _ in devices)
        if self.counts_on_device and (len(devices) > 1 or (table.device.type, torch.float32) not in devices):
            return False  # the launch reads float32
        self._trained = [[*entry["params"]] for entry in groups]
        kinds = [
            parameters,
            self.squares or [],
            self.buffers or [],
            (self.steps or []) if self.counts_on_device else [],
        ]
        self.addresses = [[*map(Tensor.data_ptr, tensors)] for tensors in kinds]
        self._on_device = [*chain.from_iterable(kinds)]
        self._all_addresses = [*chain.from_iterable(self.addresses)]
        self._step_method = type(optimizer).step
        return True

    def counts(self) -> list[float]:
        """Return the number of steps of each parameter, if it is on the host."""
        assert self.steps is not None and not self.counts_on_device
        return [*map(Tensor.item, self.steps)]


def _tensors(optimizer: Optimizer, parameters: list[Tensor], columns: Iterable[list[str]]) -> list[Tensor]:
    """Return the parameters, followed by a tensor of each parameter's state for each column of names."""
    states, tensors = [*map(optimizer.state.get, parameters)], [*parameters]
    for column in columns:
        tensors += map(getitem, states, column)  # type: ignore[arg-type]
    return tensors


def _names(respond: Respond | None, entry: Mapping[str, Any]) -> Names | None:
    """Return the names of the tensors of a parameter; None if the optimizer needs the eager noise."""
    if respond is adam_response:
        return "max_exp_avg_sq" if entry["amsgrad"] else "exp_avg_sq", "exp_avg"
    if respond is rmsprop_response and not entry["centered"]:
        return "square_avg", "momentum_buffer" if entry["momentum"] else None
    if respond is sgd_response:
        return None, "momentum_buffer" if entry["momentum"] else None
    return None


def _fits(states: list[Tensor], parameters: list[Tensor]) -> bool:
    """Check whether tensors of the optimizer lie in memory as their parameters do."""
    return all(
        isinstance(state, Tensor)
        and state.stride() == parameter.stride()
        and state.device == parameter.device
        and state.dtype in DTYPES
        for state, parameter in zip(states, parameters, strict=True)
    )
