"""Where the slices of a fused update lie in memory: built once, pointed anew at every step, without host waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.particles import noise

KINDS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
MOST_HEADS = 64
COLUMNS = 14  # `particles.fused` says what they are


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
        first = self.parts[0].parameter()
        self.device, self.dtype = first.device, first.dtype
        owners: dict[tuple[int, str], int] = {}
        self._owners = [part for part in self.parts if _is_new(owners, part)]
        self._slots = [(owner.module._parameters, owner.attribute) for owner in self._owners]
        self._layout = [(s.parameter().shape, s.parameter().stride(), s.parameter().dtype) for s in self._owners]
        rows = [_row(part, owners[id(part.module), part.attribute]) for part in self.parts]
        self._static = torch.tensor(
            [
                [0, *row.strides, 0, *row.strides, row.inner, row.size, *row.elements, number,
                 noise.stream(seed, f"{groups[number].name}/{k}")]
                for row, (number, k, _) in zip(rows, parts, strict=True)
            ]
        )  # fmt: skip
        self._index = torch.tensor([row.owner for row in rows])
        self._offsets = torch.tensor([row.offset for row in rows])
        self._pointers: list[int] = []
        self.flat = all(row.flat for row in rows)
        self.aligned = False
        self.rows = self._static.to(self.device)  # [slices, COLUMNS]
        counts = [0, *(len(group.slices) for group in groups)]
        self.starts = torch.tensor(counts).cumsum(0, dtype=torch.int32).to(self.device)  # first slice of each group

    def refresh(self) -> bool:
        """Point at where weights and gradients are now; False where they no longer fit the layout."""
        pointers: list[int] = []
        for slots, name in self._slots:  # the one loop the host runs at every step
            parameter = slots.get(name)
            if parameter is None or parameter.grad is None:
                return False
            pointers += (parameter.data_ptr(), parameter.grad.data_ptr())
        if pointers == self._pointers:
            return True
        if not all(map(_same_layout, self._owners, self._layout)):
            return False
        self._point(pointers)
        return True

    def _point(self, pointers: list[int]) -> None:
        where = torch.tensor(pointers).view(-1, 2)[self._index]  # [slices, 2]
        fresh = self._static.clone()
        fresh[:, 0] = where[:, 0] + self._offsets
        fresh[:, 4] = where[:, 1] + self._offsets
        # Addresses (bytes), strides over heads and sizes (elements) that all divide by 16 allow wide loads.
        self.aligned = bool((fresh[:, [0, 1, 4, 5, 9]] % 16 == 0).all())
        self.rows.copy_(fresh.pin_memory() if self.device.type == "cuda" else fresh, non_blocking=True)
        self._pointers = pointers


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


def _same_layout(owner: HeadSlice, layout: tuple[torch.Size, tuple[int, ...], torch.dtype]) -> bool:
    """Whether a parameter and its gradient still have the shape, strides and dtype of `layout`."""
    parameter = owner.parameter()
    grad = parameter.grad
    if grad is None or grad.layout != torch.strided:
        return False
    return all((tensor.shape, tensor.stride(), tensor.dtype) == layout for tensor in (parameter, grad))


def _is_new(owners: dict[tuple[int, str], int], part: HeadSlice) -> bool:
    key = (id(part.module), part.attribute)
    if key in owners:
        return False
    owners[key] = len(owners)
    return True


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
