"""Where the slices of a fused update lie in memory: built once, pointed anew at every step, without host waits."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.particles import noise
from repulsive.repulsion.owners import Owners

KINDS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
MOST_HEADS = 64
COLUMNS = 9  # `particles.fused` says what they are


@dataclass(frozen=True)
class Row:
    """One slice: its parameter's number, offset from that parameter's start (bytes), strides and sizes (elements)."""

    owner: int
    offset: int
    strides: tuple[int, int, int]
    inner: int
    size: int
    elements: tuple[int, int]
    flat: bool


class SliceTable:
    """The slices of groups with equally many heads, of one dtype, on one device."""

    def __init__(self, groups: Sequence[HeadGroup], seed: int) -> None:
        parts = [(number, k, part) for number, group in enumerate(groups) for k, part in enumerate(group.slices)]
        self.parts = [part for _, _, part in parts]
        self.owners = Owners(self.parts)
        self.parameters, _ = self.owners.look()  # as last seen, one per owner
        self.device, self.dtype = self.parameters[0].device, self.parameters[0].dtype
        self._device_number = self.parameters[0].get_device()
        self._shapes = [parameter.shape for parameter in self.parameters]
        self._strides = [parameter.stride() for parameter in self.parameters]
        rows = [_row(part, self.owners.number(part)) for part in self.parts]
        static = [
            [*row.strides, row.inner, row.size, *row.elements, number, noise.stream(seed, f"{groups[number].name}/{k}")]
            for row, (number, k, _) in zip(rows, parts, strict=True)
        ]
        self.rows = torch.tensor(static).to(self.device)  # [slices, COLUMNS]
        self.pointers = torch.zeros(len(rows), 2, dtype=torch.int64, device=self.device)
        counts = [0, *(len(group.slices) for group in groups)]
        self.starts = torch.tensor(counts).cumsum(0, dtype=torch.int32).to(self.device)  # first slice of each group
        self.flat = all(row.flat for row in rows)
        self.aligned = False
        self._even = all((row.offset | row.strides[0] | row.size) % 16 == 0 for row in rows)
        self.owner_of = [row.owner for row in rows]
        self._offsets = [row.offset for row in rows]
        self._addresses: tuple[list[int], list[int]] = ([], [])

    def refresh(self) -> bool:
        """Point at where weights and gradients are now; False where they no longer fit the layout."""
        parameters, gradients = self.owners.look()
        present = [grad for grad in gradients if grad is not None]
        if len(present) < len(gradients):
            return False
        try:
            weights, grads = list(map(Tensor.data_ptr, parameters)), list(map(Tensor.data_ptr, present))
        except RuntimeError:  # sparse, say: tensors without an address
            return False
        self.parameters = parameters
        if (weights, grads) == self._addresses:
            return True
        still = weights == self._addresses[0]
        if 0 in weights or 0 in grads or not (still or self._fits(parameters)) or not self._fits(present):
            return False
        self._point(weights, grads)
        return True

    def _fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether parameters, or gradients, still have the shapes, strides, dtype and device of the table."""
        return (
            [tensor.stride() for tensor in tensors] == self._strides
            and [tensor.shape for tensor in tensors] == self._shapes
            and {tensor.dtype for tensor in tensors} == {self.dtype}
            and {tensor.get_device() for tensor in tensors} == {self._device_number}
        )

    def _point(self, weights: list[int], grads: list[int]) -> None:
        # Addresses (bytes), strides over heads and sizes (elements) that all divide by 16 allow wide loads.
        self.aligned = self._even and reduce(or_, weights) % 16 == 0 and reduce(or_, grads) % 16 == 0
        places = zip(self.owner_of, self._offsets, strict=True)
        fresh = array("q", [start[owner] + offset for owner, offset in places for start in (weights, grads)])
        send(torch.frombuffer(fresh, dtype=torch.int64).view(-1, 2), self.pointers)
        self._addresses = weights, grads


def send(fresh: Tensor, target: Tensor) -> None:
    """Copy a few numbers to the device without waiting: from memory the allocator keeps until they have arrived."""
    target.copy_(fresh.pin_memory() if target.is_cuda else fresh, non_blocking=True)


def fits(part: HeadSlice) -> bool:
    """Whether a slice can be read in place by the fused kernels."""
    parameter = part.parameter()
    return (
        not hasattr(parameter, "placements")
        and parameter.dtype in KINDS
        and parameter.ndim == 2
        and part.attribute in part.module._parameters
        and part.num_heads <= MOST_HEADS
        and part.dim < 2**31
        and part.view(parameter) is not None
    )


def _row(part: HeadSlice, owner: int) -> Row:
    """Strides of a slice, its smaller one innermost so that neighbours in memory are read together."""
    parameter = part.parameter()
    view: Tensor | None = part.view(parameter)
    assert view is not None
    head_stride, row_stride, column_stride = view.stride()
    rows, columns = view.shape[1:]
    offset = int(view.storage_offset() - parameter.storage_offset()) * parameter.element_size()
    size = rows * columns
    if column_stride == 1 and (row_stride == columns or rows == 1):
        return Row(owner, offset, (head_stride, 0, 1), size, size, (0, 1), True)
    if column_stride <= row_stride:
        return Row(owner, offset, (head_stride, row_stride, column_stride), columns, size, (columns, 1), False)
    return Row(owner, offset, (head_stride, column_stride, row_stride), rows, size, (1, columns), False)
