"""Where the slices of a fused update lie in memory: built once, pointed anew at every step, without host waits."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import attrgetter, or_

import torch
from torch import Tensor

from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.particles import noise
from repulsive.repulsion.owners import Owners

KINDS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
MOST_HEADS = 64
_GRADIENT = attrgetter("grad")
_IS_TRAINED = attrgetter("requires_grad")
Addresses = tuple[list[int], list[int]]  # of weights and of gradients
COLUMNS = 9  # `particles.fused` says what they are
MOST_PLACES = 8  # sets of addresses that are remembered: allocators give gradients the same few places again and again


@dataclass(eq=False)
class Place:
    """Addresses of weights and gradients, on the device.

    Args:
        pointers: int64 [slices, 2].
        number: which of the sets that are remembered; negative for others.
        aligned: whether wide loads are allowed.
    """

    pointers: Tensor
    number: int
    aligned: bool = False


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
        counts = [0, *(len(group.slices) for group in groups)]
        self.starts = torch.tensor(counts).cumsum(0, dtype=torch.int32).to(self.device)  # first slice of each group
        self.flat = all(row.flat for row in rows)
        self._even = all((row.offset | row.strides[0] | row.size) % 16 == 0 for row in rows)
        self.owner_of = [row.owner for row in rows]
        self.group_of = [number for number, _, _ in parts]
        self._slices_of: list[list[int]] = [[] for _ in groups]
        for number, group in enumerate(self.group_of):
            self._slices_of[group].append(number)
        self._offsets = [row.offset for row in rows]
        self._addresses: Addresses = ([], [])
        self._places: dict[tuple[int, ...], Place] = {}  # the longest unused first
        self._captured: list[tuple[Place, Tensor]] = []  # what graphs of others read, as long as they may be replayed
        self.place = Place(torch.zeros(len(rows), 2, dtype=torch.int64, device=self.device), -1)

    def refresh(self, quickly: bool = False) -> bool:
        """Point at where weights and gradients are now; False where they no longer fit the layout.

        Args:
            quickly: the modules have the parameters they had at the last call.
        """
        parameters = self.parameters if quickly else self.owners.look()[0]
        if quickly and not all(map(_IS_TRAINED, parameters)):
            return False  # frozen since
        try:
            weights = list(map(Tensor.data_ptr, parameters))
            grads = list(map(Tensor.data_ptr, map(_GRADIENT, parameters)))
        except (RuntimeError, TypeError):  # a tensor without an address, sparse, say; or no gradient
            return False
        self.parameters = parameters
        if (weights, grads) == self._addresses:
            return True
        key = (*weights, *grads)
        known = self._places.pop(key, None)
        if known is None:
            still = weights == self._addresses[0]
            if 0 in key or not (still or self._fits(parameters)) or not self._fits([*map(_GRADIENT, parameters)]):
                return False
            known = self._point(weights, grads)
        self.place, self._addresses = known, (weights, grads)
        if known.number >= 0:
            self._places[key] = known
        return True

    def gradient(self, group: int) -> Tensor:
        """That of a group's heads, [M, D], its slices one after the other."""
        found = []
        for number in self._slices_of[group]:
            grad = self.parameters[self.owner_of[number]].grad
            assert grad is not None
            found.append(self.parts[number].take(grad))
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)

    def _fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether parameters, or gradients, still have the shapes, strides, dtype and device of the table."""
        return (
            [tensor.stride() for tensor in tensors] == self._strides
            and [tensor.shape for tensor in tensors] == self._shapes
            and {tensor.dtype for tensor in tensors} == {self.dtype}
            and {tensor.get_device() for tensor in tensors} == {self._device_number}
        )

    def _point(self, weights: list[int], grads: list[int]) -> Place:
        """Send new addresses, to where the longest unused ones are if there are many."""
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing:  # a graph of somebody else: nobody may ever change its addresses
            place = Place(torch.empty_like(self.place.pointers), -2 - len(self._captured))
        elif len(self._places) < MOST_PLACES:
            place = Place(torch.empty_like(self.place.pointers), len(self._places))
        else:
            place = self._places.pop(next(iter(self._places)))
        # Addresses (bytes), strides over heads and sizes (elements) that all divide by 16 allow wide loads.
        place.aligned = self._even and reduce(or_, weights) % 16 == 0 and reduce(or_, grads) % 16 == 0
        pairs = zip(self.owner_of, self._offsets, strict=True)
        fresh = array("q", [start[owner] + offset for owner, offset in pairs for start in (weights, grads)])
        sent = send(torch.frombuffer(fresh, dtype=torch.int64).view(-1, 2), place.pointers)
        if capturing:
            self._captured.append((place, sent))
        return place


def send(fresh: Tensor, target: Tensor) -> Tensor:
    """Copy a few numbers to the device without waiting: from memory the allocator keeps until they have arrived.

    Returns:
        That memory.
    """
    source = fresh.pin_memory() if target.is_cuda else fresh
    target.copy_(source, non_blocking=True)
    return source


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
