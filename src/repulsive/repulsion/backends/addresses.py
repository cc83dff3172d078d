"""Pointer table of a fused update: slice strides are built once; addresses are updated without waiting on the host."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import attrgetter, or_

import torch
from torch import Tensor

from repulsive.heads.layout import HeadGroup, HeadSlice, join, stack_heads
from repulsive.heads.sharded_tensors import is_sharded
from repulsive.particles import noise
from repulsive.repulsion.cuda_graphs import is_capturing
from repulsive.repulsion.parameter_lookup import ParameterLookup

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
MOST_HEADS = 64
_GRADIENT = attrgetter("grad")
_IS_TRAINED = attrgetter("requires_grad")
Addresses = tuple[list[int], list[int]]  # addresses of weights, addresses of gradients
COLUMNS = 9  # columns of the table; see `triton_kernels.slices`
MOST_POINTER_SETS = 32  # pointer sets kept on the device: allocators reuse the same few addresses for gradients


@dataclass(eq=False)
class PointerSet:
    """Addresses of all weights and gradients, stored on the device.

    Args:
        pointers: addresses of weight and gradient, int64 [slices, 2]; if heads are in several modules, the starts of
            heads follow, [slices, 2, padded heads]; see `triton_kernels.slices`.
        aligned: whether the alignment of the addresses allows wide loads.
    """

    pointers: Tensor
    aligned: bool = False


@dataclass(frozen=True)
class Row:
    """One slice: index of its parameter, offset in that parameter (bytes), strides and sizes (elements)."""

    parameter: int
    offset: int
    strides: tuple[int, int, int]
    inner: int
    size: int
    elements: tuple[int, int]
    flat: bool


class SliceTable:
    """Table of the slices of groups that have the same number of heads, dtype and device.

    If heads are in several modules, a row of the table is a run of slices, one per module.

    Args:
        groups: the groups; all in one module each, or all in several.
        seed: seed of the noise.
        padded: number of heads, padded to a power of two.
    """

    def __init__(self, groups: Sequence[HeadGroup], seed: int, padded: int) -> None:
        runs = [(index, k, run) for index, group in enumerate(groups) for k, run in enumerate(group.runs())]
        self.runs = [run for _, _, run in runs]
        self.parts = [run[0] for run in self.runs]
        self.apart = groups[0].modules > 1
        self._padded = padded
        self.lookup = ParameterLookup([part for run in self.runs for part in run])
        self.parameters, _ = self.lookup.current()  # at the last refresh
        self.device, self.dtype = self.parameters[0].device, self.parameters[0].dtype
        self._device_index = self.parameters[0].get_device()
        self._shapes = [parameter.shape for parameter in self.parameters]
        self._strides = [parameter.stride() for parameter in self.parameters]
        rows = [_row(part, self.lookup.index_of(part)) for part in self.parts]
        static = [
            [*row.strides, row.inner, row.size, *row.elements, index, noise.stream(seed, f"{groups[index].name}/{k}")]
            for row, (index, k, _) in zip(rows, runs, strict=True)
        ]
        self.rows = torch.tensor(static, device="cpu").to(self.device)  # [slices, COLUMNS]
        counts = [0, *(len(group.runs()) for group in groups)]
        starts = torch.tensor(counts, device="cpu").cumsum(0, dtype=torch.int32)
        self.starts = starts.to(self.device)  # first slice of each group
        self.flat = all(row.flat for row in rows)
        # 16 columns that follow each other, from a multiple of 16 on, are adjacent in memory.
        self.chunked = all(row.strides[2] == 1 and (row.inner | row.strides[1]) % 16 == 0 for row in rows)
        self.divides_by_16 = all((row.offset | row.strides[0] | row.size) % 16 == 0 for row in rows)
        self.parameter_of = [row.parameter for row in rows]
        self.parameters_of = [[self.lookup.index_of(part) for part in run] for run in self.runs]
        self.group_of = [index for index, _, _ in runs]
        self._slices_of: list[list[int]] = [[] for _ in groups]
        for index, group in enumerate(self.group_of):
            self._slices_of[group].append(index)
        self.offsets = [row.offset for row in rows]
        self._addresses: Addresses = ([], [])
        self._sets: dict[tuple[int, ...], PointerSet] = {}  # least recently used first
        self._captured: list[tuple[PointerSet, Tensor]] = []  # read by the user's CUDA graphs, so never freed
        self._head_strides = [row.strides[0] for row in rows]
        numbers = 2 * len(rows) * (1 + padded if self.apart else 1)
        self._own = torch.zeros(numbers, dtype=torch.int64, device=self.device)  # read by the update's own graphs
        self.current = PointerSet(self._own)

    def refresh(self, quickly: bool = False) -> bool:
        """Point the table at the current weights and gradients.

        Args:
            quickly: skip the parameter lookup, because modules have the same parameters as at the last call.

        Returns:
            False if weights or gradients no longer fit the table.
        """
        parameters = self.parameters if quickly else self.lookup.current()[0]
        if quickly and not all(map(_IS_TRAINED, parameters)):
            return False  # some parameters were frozen
        try:
            weights = list(map(Tensor.data_ptr, parameters))
            grads = list(map(Tensor.data_ptr, map(_GRADIENT, parameters)))
        except (RuntimeError, TypeError):  # no gradient, or a tensor without an address, such as a sparse one
            return False
        self.parameters = parameters
        is_captured = not quickly and is_capturing()  # a capture never refreshes quickly
        if (weights, grads) == self._addresses and not is_captured:
            return True
        key = (*weights, *grads)
        pointer_set = None if is_captured else self._sets.pop(key, None)
        if pointer_set is None:
            same_weights = weights == self._addresses[0]
            if 0 in key or not (same_weights or self._fits(parameters)):
                return False
            if not self._fits([*map(_GRADIENT, parameters)]):
                return False
            pointer_set = self._send_addresses(weights, grads, is_captured=is_captured)
        if is_captured:
            self.current, self._addresses = pointer_set, ([], [])
            return True
        self._sets[key] = pointer_set
        self._own.copy_(pointer_set.pointers)
        self.current, self._addresses = PointerSet(self._own, pointer_set.aligned), (weights, grads)
        return True

    def gradient(self, group: int) -> Tensor:
        """Return the gradient of a group's heads, with its slices concatenated: [M, D]."""
        heads = []
        for index in self._slices_of[group]:
            of_modules = []
            for part, parameter in zip(self.runs[index], self.parameters_of[index], strict=True):
                grad = self.parameters[parameter].grad
                assert grad is not None
                of_modules.append(part.take(grad))
            heads.append(stack_heads(of_modules))
        return join(heads)

    def _fits(self, tensors: Sequence[Tensor]) -> bool:
        """Check whether parameters (or gradients) still have the shapes, strides, dtype and device of the table."""
        return (
            [tensor.stride() for tensor in tensors] == self._strides
            and [tensor.shape for tensor in tensors] == self._shapes
            and {tensor.dtype for tensor in tensors} == {self.dtype}
            and {tensor.get_device() for tensor in tensors} == {self._device_index}
        )

    def _send_addresses(self, weights: list[int], grads: list[int], *, is_captured: bool) -> PointerSet:
        """Send new addresses to the device. They replace the least recently used set if the maximum number is kept."""
        if is_captured or len(self._sets) < MOST_POINTER_SETS:
            pointer_set = PointerSet(torch.empty_like(self._own))
        else:
            pointer_set = self._sets.pop(next(iter(self._sets)))
        # Addresses (bytes), strides over heads and sizes (elements) that all divide by 16 allow wide loads.
        aligned = reduce(or_, weights) % 16 == 0 and reduce(or_, grads) % 16 == 0
        pairs = zip(self.parameter_of, self.offsets, strict=True)
        addresses = array("q", [start[index] + offset for index, offset in pairs for start in (weights, grads)])
        if self.apart:
            starts = self._head_starts(weights, grads)
            aligned = aligned and reduce(or_, starts) % 16 == 0
            addresses.extend(starts)
        pointer_set.aligned = self.divides_by_16 and aligned
        source = send(torch.frombuffer(addresses, dtype=torch.int64), pointer_set.pointers)
        if is_captured:  # the user's CUDA graph will read these addresses at every replay
            self._captured.append((pointer_set, source))
        return pointer_set

    def _head_starts(self, weights: list[int], grads: list[int]) -> list[int]:
        """List where heads start relative to the first head of their row, in elements: [slices, 2, padded heads]."""
        size, starts = self.dtype.itemsize, []
        for run, parameters, stride in zip(self.runs, self.parameters_of, self._head_strides, strict=True):
            for addresses in (weights, grads):
                first = addresses[parameters[0]]
                own = [
                    (addresses[parameter] - first) // size + head * stride
                    for part, parameter in zip(run, parameters, strict=True)
                    for head in range(part.num_heads)
                ]
                starts += own + [0] * (self._padded - len(own))
        return starts


def send(values: Tensor, target: Tensor) -> Tensor:
    """Copy a few numbers to the device without waiting for the transfer.

    Returns:
        The pinned copy that is sent; torch's allocator keeps it until the numbers have arrived.
    """
    source = values.pin_memory() if target.is_cuda else values
    target.copy_(source, non_blocking=True)
    return source


def can_be_read_in_place(part: HeadSlice) -> bool:
    """Check whether the Triton kernels can read a slice in place, without a copy."""
    parameter = part.parameter()
    return (
        not is_sharded(parameter)
        and parameter.dtype in DTYPES
        and part.attribute in part.module._parameters
        and part.num_heads <= MOST_HEADS
        and part.dim < 2**31
        and _as_matrices(part) is not None
    )


def are_strided_alike(run: Sequence[HeadSlice]) -> bool:
    """Check whether the slices of several modules have the same strides and offsets, so that one row describes them."""
    return len({(row.offset, row.strides, row.inner, row.size) for row in (_row(part, 0) for part in run)}) == 1


def _as_matrices(part: HeadSlice) -> Tensor | None:
    """View a parameter as heads [M, rows, columns], or [M, 1, D] if it is not a matrix; None if there is no such view.

    Weights of stacked experts, [E, out, in], have contiguous heads.
    """
    parameter = part.parameter()
    view = part.view(parameter)
    if view is None or parameter.ndim == 2:
        return view
    return view.flatten(1).unsqueeze(1) if view[0].is_contiguous() else None


def _row(part: HeadSlice, index: int) -> Row:
    """Build the table row of a slice, with the smaller stride innermost so that adjacent memory is read together."""
    parameter = part.parameter()
    view = _as_matrices(part)
    assert view is not None
    head_stride, row_stride, column_stride = view.stride()
    rows, columns = view.shape[1:]
    offset = int(view.storage_offset() - parameter.storage_offset()) * parameter.element_size()
    size = rows * columns
    if column_stride == 1 and (row_stride == columns or rows == 1):
        return Row(index, offset, (head_stride, 0, 1), size, size, (0, 1), True)
    if column_stride <= row_stride:
        return Row(index, offset, (head_stride, row_stride, column_stride), columns, size, (columns, 1), False)
    return Row(index, offset, (head_stride, column_stride, row_stride), rows, size, (1, columns), False)
