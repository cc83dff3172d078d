"""One measurement of several groups: its numbers are copied to the host together, and ratios are computed there."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial

import torch
from torch import Tensor

from repulsive.particles.rule import Measure
from repulsive.repulsion.cuda_graphs import is_capturing
from repulsive.repulsion.host_copy import HostCopy

FIELDS = tuple(field.name for field in fields(Measure))  # the columns of a measurement
DRIVE, REPULSION, DISTANCE, ALPHA = map(FIELDS.index, ("drive", "repulsion", "distance", "alpha"))
Columns = list[list[float]]  # in the order of `FIELDS`, with one number per row


class Measured:
    """One measurement of several groups.

    Numbers stay on their device until `send` or `values` is called. A measurement inside a CUDA graph that the user
    captures is never sent: it has the numbers of the last replay.

    Args:
        step: optimizer step of the measurement.
        rows: the row of each group, by group name; several groups may share a row.
        numbers: a matrix [rows, columns], or a function that computes it. The columns are those of `FIELDS`, all of
            them or the first ones.
        rest: function that computes the other columns, called if a report needs them.

    Example:
        >>> measured = Measured(0, {"q": 0, "k": 1}, torch.tensor([[2.0, 1.0], [4.0, 1.0]]))
        >>> measured.ratios()
        [0.5, 0.25]
    """

    def __init__(
        self,
        step: int,
        rows: Mapping[str, int],
        numbers: Tensor | Callable[[], Tensor],
        rest: Callable[[], Tensor] | None = None,
    ) -> None:
        self.step, self.rows = step, rows
        self._numbers, self._rest = numbers, rest
        self._is_captured = is_capturing()
        self._copy: HostCopy | None = None
        self._change: Callable[[Columns], None] | None = None
        self._first: Columns | None = None  # the columns of `numbers`
        self._all: Columns | None = None

    @classmethod
    def of(cls, step: int, rows: Mapping[str, int], measure: Measure) -> Measured:
        """Build a measurement from tensors [rows], which are joined when numbers are needed."""
        return cls(step, rows, partial(stacked, measure))

    def changed(self, change: Callable[[Columns], None]) -> Measured:
        """Return this measurement with other numbers.

        Args:
            change: function that changes the columns in place, when they are on the host: those of `numbers` alone for
                `ratios` and `distances`, all of them for `values`.
        """
        other = copy.copy(self)
        other._change = change
        return other

    def send(self) -> None:
        """Start to copy the numbers to the host, unless they are on their way."""
        if self._copy is None and not self._is_captured:
            self._copy = HostCopy(self._matrix())

    def has_arrived(self) -> bool:
        """Check whether numbers that were sent can be read without waiting for the device."""
        return self._copy is not None and self._copy.has_arrived()

    def ratios(self) -> list[float]:
        """Return |repulsion| / |drive| of each row, without NaN."""
        columns = self._first_columns()
        pairs = zip(columns[REPULSION], columns[DRIVE], strict=True)
        return _numbers(
            [repulsion / drive if drive else math.inf if repulsion else math.nan for repulsion, drive in pairs]
        )

    def distances(self) -> list[float]:
        """Return the mean distance between two heads of each row, without NaN; it must be a column of `numbers`."""
        return _numbers(self._first_columns()[DISTANCE])

    def values(self, name: str) -> dict[str, float]:
        """Return the numbers of a group, by field of `Measure`. The first call waits for the device."""
        if self._all is None or self._is_captured:
            self._all = self._read()
            if self._rest is not None:
                self._all += self._rest().t().tolist()
            if self._change is not None:
                self._change(self._all)
        row = self.rows[name]
        return {field: column[row] for field, column in zip(FIELDS, self._all, strict=True)}

    def _first_columns(self) -> Columns:
        """Return the columns of `numbers`, in the rows that belong to a group."""
        if self._first is None:
            self._first = self._read()
            if self._change is not None:
                self._change(self._first)
            rows = sorted(set(self.rows.values()))
            if len(rows) < len(self._first[0]):
                self._first = [[column[row] for row in rows] for column in self._first]
        return self._first

    def _matrix(self) -> Tensor:
        return self._numbers if isinstance(self._numbers, Tensor) else self._numbers()

    def _read(self) -> Columns:
        columns: Columns = (self._matrix() if self._copy is None else self._copy.read()).t().tolist()
        return columns


def stacked(measure: Measure) -> Tensor:
    """Return the fields of a measure, [rows] each, as the columns of one matrix."""
    return torch.stack([getattr(measure, name) for name in FIELDS], dim=1)


def _numbers(values: list[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]
