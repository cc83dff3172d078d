"""Pieces, blocks and batches of the eager update: what one torch operation reads and writes.

A *piece* is one parameter of a group: one slice, or one slice per module if the particles of a group are modules. A
*block* holds the pieces that one tensor operation works on, [pieces, M, D]. On the CPU that is a single piece: a
projection fits the cache, and stacking would cost more than a call. On a GPU, where calls are expensive, it is a stack
of pieces of one shape. Of sharded weights a block sees the columns that this rank works on, the same for every head.
A *batch* holds the groups whose coefficients are computed in one call, from Gram matrices [groups, M + 1, M + 1].
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from repulsive.heads.layout import HeadSlice, stack_heads
from repulsive.heads.sharded_tensors import is_sharded
from repulsive.particles import noise as counters
from repulsive.particles.gram import compute_dtype, gram, wide_dtype
from repulsive.particles.rule import Rule
from repulsive.repulsion.sharding.local_weights import LocalWeight
from repulsive.repulsion.sharding.shard_layout import MeshDims, local_size

T = TypeVar("T")

MAX_BLOCK = 2**26  # elements of one block: half a gigabyte while its products are summed in float64


@dataclass(frozen=True)
class Piece:
    """One parameter of one group: a slice, or the slices of several modules, whose heads follow each other.

    A module without a gradient in this step takes part as it is: its gradient counts as zero, and stays None.

    Args:
        group: index of the group.
        slices: one, or one per module.
        noise_name: name of the noise stream.
        weights: the weight of each slice.
    """

    group: int
    slices: tuple[HeadSlice, ...]
    noise_name: str
    weights: tuple[LocalWeight, ...]

    @property
    def num_heads(self) -> int:
        return sum(part.num_heads for part in self.slices)

    @property
    def dim(self) -> int:
        return self.slices[0].dim

    @property
    def size(self) -> int:
        """Number of elements of the parameters on this rank."""
        return sum(local_size(part) for part in self.slices)

    def theta(self) -> Tensor:
        return stack_heads([part.take(weight.weights()) for part, weight in self._pairs()])  # [M, D], or local part

    def grad(self) -> Tensor:
        return stack_heads([part.take(weight.gradients()) for part, weight in self._pairs()])  # [M, D]

    def put_theta(self, heads: Tensor) -> None:
        for part, weight, own in self._split(heads):
            part.put(weight.weights(), own)

    def put_grad(self, heads: Tensor) -> None:
        for part, weight, own in self._split(heads):
            if weight.grad is not None:
                part.put(weight.grad, own)

    def noise_scales(self, rule: Rule, rates: Mapping[int, float]) -> list[float]:
        """The factor on the noise of each slice."""
        return [rule.noise_scale(rates.get(id(part.parameter()), 0.0)) for part in self.slices]

    def draw(self, like: Tensor, *, step: int, seed: int) -> Tensor:
        """Draw standard normal numbers [M, D], determined by (seed, step, group, element)."""
        key = counters.key(seed, step, self.noise_name)
        elements = self._elements()
        return counters.normal(key, elements, dtype=like.dtype, device=like.device).view_as(like)

    def block_key(self) -> tuple[object, ...]:
        """A key that is equal for pieces that may share a block."""
        parameter = self.slices[0].parameter()
        if not is_sharded(parameter):
            return (self.dim, parameter.dtype)
        where = (parameter.device_mesh, tuple(parameter.placements), parameter.shape, self.slices[0].axis)
        return (self.dim, parameter.dtype, *where)

    def _pairs(self) -> Iterator[tuple[HeadSlice, LocalWeight]]:
        return zip(self.slices, self.weights, strict=True)

    def _split(self, heads: Tensor) -> Iterator[tuple[HeadSlice, LocalWeight, Tensor]]:
        sizes = [part.num_heads for part in self.slices]
        return zip(self.slices, self.weights, heads.split(sizes), strict=True)

    def _elements(self) -> Tensor | int:
        """Indices of the local elements, [M, local D], or just their number if all are here."""
        first = self.weights[0].elements(self.slices[0])
        if isinstance(first, int):
            return first * len(self.slices)
        length = self.slices[0].num_heads * self.dim
        return torch.cat([first + index * length for index in range(len(self.slices))])


@dataclass(frozen=True)
class Block:
    """Pieces that one tensor operation works on, and the position of each piece's group in the batch."""

    pieces: list[Piece]
    rows: Tensor

    def gather(self, read: Callable[[Piece], Tensor]) -> Tensor:
        """Read all pieces and stack them to [pieces, M, D] in the dtype to compute in."""
        parts = [read(piece) for piece in self.pieces]
        stacked = parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)
        return stacked.to(compute_dtype(stacked))


class Batch:
    """Groups with the same number of heads on one device, whose coefficients are computed in one call.

    Args:
        members: indices of the groups.
        pieces: their parameters.
    """

    def __init__(self, members: list[int], pieces: Sequence[Piece]) -> None:
        self.members, self.pieces = members, pieces
        self.device = pieces[0].slices[0].parameter().device
        self.heads = pieces[0].num_heads
        position = {group: row for row, group in enumerate(members)}
        self.weights = list(dict.fromkeys(weight for piece in pieces for weight in piece.weights))
        buckets: dict[object, list[Piece]] = defaultdict(list)
        for index, piece in enumerate(pieces):
            buckets[index if self.device.type == "cpu" else piece.block_key()].append(piece)
        self.blocks = [
            Block(bucket, torch.tensor([position[piece.group] for piece in bucket], device=self.device))
            for alike in buckets.values()
            for bucket in split_by_size(alike, MAX_BLOCK, lambda piece: piece.size)
        ]

    def products(self, *reads: Callable[[Piece], Tensor]) -> Tensor:
        """Gram matrices [reads, groups, M + 1, M + 1], summed over the pieces of a group and over ranks."""
        size = (len(reads), len(self.members), self.heads + 1, self.heads + 1)
        totals: dict[MeshDims, Tensor] = {}  # nearly always one entry
        for block in self.blocks:
            dims = block.pieces[0].weights[0].summed_dims
            if dims not in totals:
                totals[dims] = torch.zeros(size, dtype=wide_dtype(self.device), device=self.device)
            for total, read in zip(totals[dims], reads, strict=True):
                total.index_add_(0, block.rows, gram(block.gather(read)).products)
        for dims, total in totals.items():
            for mesh, dim in dims:
                torch.distributed.all_reduce(total, group=mesh.get_group(dim))
        return torch.stack(list(totals.values())).sum(0)


def split_by_size(items: Sequence[T], most: int, size: Callable[[T], int]) -> list[list[T]]:
    """Split a sequence into consecutive chunks of total size at most `most`; a larger item gets its own chunk."""
    runs: list[list[T]] = []
    room = 0
    for item in items:
        if not runs or size(item) > room:
            runs.append([])
            room = most
        runs[-1].append(item)
        room -= size(item)
    return runs
