"""Eager update in plain torch: read particles, write gradients. It is the reference for the fused backend.

A *block* holds the slices that one tensor operation works on. On the CPU that is a single slice: a projection fits the
cache, and stacking would cost more than a call. On a GPU, where calls are expensive, it is a stack of slices of the
same shape. If weights are sharded, a block holds only the columns that this rank works on, the same for every head.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.particles import noise as counters
from repulsive.particles.gram import Gram, apply_matrix, compute_dtype, full_precision, gram, wide_dtype
from repulsive.particles.rule import Coefficients, Measure, Rule
from repulsive.particles.sgld import SGLD
from repulsive.repulsion.sharding.local_weights import LocalWeight, load_local
from repulsive.repulsion.sharding.shard_layout import MeshDims, has_heads_on_other_ranks, is_sharded, local_size

T = TypeVar("T")
Sigmas = dict[str, "float | Tensor"]  # by `Piece.noise_name`

_PLAIN = SGLD(stepsize=1.0, temperature=0.0)  # leaves the gradient unchanged, to measure training without a rule
MAX_BLOCK = 2**26  # elements of one block: half a gigabyte while its products are summed in float64
MAX_MOVED = 2**28  # bytes of weights and gradients that are moved here from other ranks at one time


@dataclass(frozen=True)
class Measured:
    """One group's entry in a measurement of several groups. Numbers stay on their device until `values` is called."""

    step: int
    measure: Measure
    row: int

    def values(self) -> dict[str, float]:
        """Return every field of the measure as a number."""
        tensors: dict[str, Tensor] = vars(self.measure)
        return {name: float(value[self.row]) for name, value in tensors.items()}


@dataclass(frozen=True)
class Piece:
    """One slice of a group, with the local weight that contains it; `group` is the index of the group."""

    group: int
    slice: HeadSlice
    noise_name: str
    weight: LocalWeight

    def theta(self) -> Tensor:
        assert self.weight.theta is not None
        return self.slice.take(self.weight.theta)  # [M, D], or the local part of D

    def grad(self) -> Tensor:
        assert self.weight.grad is not None
        return self.slice.take(self.weight.grad)  # [M, D]

    def put_theta(self, heads: Tensor) -> None:
        assert self.weight.theta is not None
        self.slice.put(self.weight.theta, heads)

    def put_grad(self, heads: Tensor) -> None:
        assert self.weight.grad is not None
        self.slice.put(self.weight.grad, heads)

    def rate(self, rates: Mapping[int, float]) -> float:
        return rates.get(id(self.slice.parameter()), 0.0)

    def draw(self, like: Tensor, *, step: int, seed: int) -> Tensor:
        """Draw standard normal numbers [M, D], determined by (seed, step, group, element)."""
        key = counters.key(seed, step, self.noise_name)
        elements = self.weight.elements(self.slice)
        return counters.normal(key, elements, dtype=like.dtype, device=like.device).view_as(like)

    def block_key(self) -> tuple[object, ...]:
        """Key that is equal for pieces that may be stacked into one block."""
        parameter = self.slice.parameter()
        if not is_sharded(parameter):
            return (self.slice.dim, parameter.dtype)
        where = (parameter.device_mesh, tuple(parameter.placements), parameter.shape, self.slice.axis)
        return (self.slice.dim, parameter.dtype, *where)


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
        pieces: the slices of all groups.
    """

    def __init__(self, members: list[int], pieces: Sequence[Piece]) -> None:
        self.members, self.pieces = members, pieces
        parameter = pieces[0].slice.parameter()
        self.device = parameter.device
        self.heads = pieces[0].slice.num_heads
        position = {group: row for row, group in enumerate(members)}
        self.weights = list(dict.fromkeys(piece.weight for piece in pieces))
        buckets: dict[object, list[Piece]] = defaultdict(list)
        for index, piece in enumerate(pieces):
            buckets[index if self.device.type == "cpu" else piece.block_key()].append(piece)
        self.blocks = [
            Block(bucket, torch.tensor([position[piece.group] for piece in bucket], device=self.device))
            for alike in buckets.values()
            for bucket in _split_by_size(alike, MAX_BLOCK, lambda piece: local_size(piece.slice))
        ]

    def products(self, *reads: Callable[[Piece], Tensor]) -> Tensor:
        """Compute Gram matrices [reads, groups, M + 1, M + 1], summed over the slices of a group and over ranks."""
        size = (len(reads), len(self.members), self.heads + 1, self.heads + 1)
        totals: dict[MeshDims, Tensor] = {}  # nearly always one entry
        for block in self.blocks:
            dims = block.pieces[0].weight.summed_dims
            if dims not in totals:
                totals[dims] = torch.zeros(size, dtype=wide_dtype(self.device), device=self.device)
            for total, read in zip(totals[dims], reads, strict=True):
                total.index_add_(0, block.rows, gram(block.gather(read)).products)
        for dims, total in totals.items():
            for mesh, dim in dims:
                torch.distributed.all_reduce(total, group=mesh.get_group(dim))
        return torch.stack(list(totals.values())).sum(0)


class EagerUpdate:
    """The update of a fixed set of groups, in plain torch.

    Args:
        groups: the groups.
        seed: seed of the noise.
    """

    def __init__(self, groups: Sequence[HeadGroup], seed: int) -> None:
        self.groups = list(groups)
        self.seed = seed
        parts = [(index, number, part) for index, g in enumerate(groups) for number, part in enumerate(g.slices)]
        weights = {_parameter_key(part): LocalWeight(part) for _, _, part in reversed(parts)}
        self.pieces = [
            Piece(index, part, f"{groups[index].name}/{number}", weights[_parameter_key(part)])
            for index, number, part in parts
        ]
        kinds: dict[tuple[int, torch.device, bool], list[int]] = defaultdict(list)
        for index, group in enumerate(groups):
            is_moved = any(has_heads_on_other_ranks(part) for part in group.slices)
            kinds[group.num_heads, group.slices[0].parameter().device, is_moved].append(index)
        self.batches = [
            Batch(some, [piece for piece in self.pieces if piece.group in set(some)])
            for (_, _, is_moved), members in kinds.items()
            for some in (_split_by_size(members, MAX_MOVED, self._bytes_moved) if is_moved else [members])
        ]

    def _bytes_moved(self, index: int) -> int:
        """Count the bytes of weights and gradients that one group moves to this rank from other ranks."""
        parameters = {_parameter_key(part): part for part in self.groups[index].slices}.values()
        return sum(2 * local_size(part) * part.parameter().element_size() for part in parameters)

    def run(
        self,
        rule: Rule | None,
        rates: Mapping[int, float],
        *,
        step: int,
        scale: Tensor | None = None,
        measure: bool = False,
        draw_noise: bool = True,
    ) -> dict[str, Measured]:
        """Replace gradients by the direction of a rule; see `Update.run`."""
        if rule is None and not measure:
            return {}
        if rule is not None and not rule.has_matrix_form:
            return self._run_directly(rule, rates, step, scale, draw_noise)
        measured: dict[str, Measured] = {}
        for batch in self.batches:
            local = load_local(batch.weights, whole=_needs_whole(rule), write=None if rule is None else "grad")
            with torch.no_grad(), full_precision(batch.device), local:
                coefficients = self._coefficients(batch, rule or _PLAIN, step, scale, measure)
                if coefficients.measure is not None:
                    for row, index in enumerate(batch.members):
                        measured[self.groups[index].name] = Measured(step, coefficients.measure, row)
                if rule is not None:
                    sigmas = self._sigmas(batch.pieces, rule, rates, scale) if draw_noise else {}
                    for block in batch.blocks:
                        self._write(block, rule, coefficients, sigmas, step, scale)
        return measured

    def add_noise(self, rule: Rule, rates: Mapping[int, float], *, step: int) -> None:
        """Add a rule's noise directly to the parameters: -lr * sigma * xi, as a step of plain SGD would."""
        by_weight: dict[LocalWeight, list[Piece]] = defaultdict(list)
        for piece in self.pieces:
            by_weight[piece.weight].append(piece)
        for weight, pieces in by_weight.items():
            lr = pieces[0].rate(rates)
            scale = lr * rule.noise_scale(lr)
            if scale:
                with torch.no_grad(), load_local([weight], gradients=False, write="theta"):
                    for piece in pieces:
                        theta = piece.theta()
                        theta = theta.to(compute_dtype(theta))
                        piece.put_theta(theta - scale * piece.draw(theta, step=step, seed=self.seed))

    def add_to_gradients(self, rule: Rule, rates: Mapping[int, float], *, step: int, scale: Tensor | None) -> None:
        """Add a rule's noise to the gradients: sigma * xi."""
        sigmas = self._sigmas(self.pieces, rule, rates, scale)
        if not sigmas:
            return
        weights = dict.fromkeys(piece.weight for piece in self.pieces)
        with torch.no_grad(), load_local(weights, whole=_needs_whole(rule)):
            for piece in self.pieces:
                grad = piece.grad()
                noise = self._noise(piece, grad.to(compute_dtype(grad)), sigmas, step)
                piece.put_grad(grad + (noise if scale is None else noise * scale.to(noise.dtype)))

    def _coefficients(self, batch: Batch, rule: Rule, step: int, scale: Tensor | None, measure: bool) -> Coefficients:
        if not (measure or rule.needs_gradient_products):
            return rule.coefficients(Gram(batch.products(Piece.theta)[0]), step=step)
        theta, grad = batch.products(Piece.theta, Piece.grad)
        if scale is not None:
            grad = grad / scale.to(grad.dtype).square()
        return rule.coefficients(Gram(theta), Gram(grad), step=step)

    def _write(
        self,
        block: Block,
        rule: Rule,
        coefficients: Coefficients,
        sigmas: Sigmas,
        step: int,
        scale: Tensor | None,
    ) -> None:
        grad = block.gather(Piece.grad)  # [pieces, M, D]
        result = coefficients.drive[block.rows].to(grad.dtype) @ grad
        extra: Tensor | None = None  # the terms without the loss scale
        if coefficients.force is not None:
            extra = apply_matrix(coefficients.force[block.rows], block.gather(Piece.theta))
        if sigmas:
            noise = torch.stack([self._noise(piece, grad[0], sigmas, step) for piece in block.pieces])
            extra = noise if extra is None else extra + noise
        if extra is not None:
            result += extra if scale is None else extra * scale.to(extra.dtype)
        for piece, heads in zip(block.pieces, result, strict=True):
            piece.put_grad(heads)

    def _sigmas(self, pieces: Sequence[Piece], rule: Rule, rates: Mapping[int, float], scale: Tensor | None) -> Sigmas:
        """Compute the noise factor sigma of each piece; empty if there is no noise. `pieces` must hold whole groups."""
        if not rates:
            return {}
        sigmas: Sigmas = {piece.noise_name: rule.noise_scale(piece.rate(rates)) for piece in pieces}
        if not any(sigmas.values()):
            return {}
        if rule.scales_noise:
            groups: dict[int, list[Piece]] = defaultdict(list)
            for piece in pieces:
                groups[piece.group].append(piece)
            for members in groups.values():
                grad = torch.cat([piece.grad() for piece in members], dim=-1)  # [M, D]
                grad = grad.to(compute_dtype(grad))
                factor = rule.noise_factor(grad if scale is None else grad / scale)
                sigmas |= {piece.noise_name: sigmas[piece.noise_name] * factor for piece in members}
        return sigmas

    def _noise(self, piece: Piece, like: Tensor, sigmas: Sigmas, step: int) -> Tensor:
        """Draw the noise sigma * xi of one piece, [M, D]."""
        return sigmas[piece.noise_name] * piece.draw(like, step=step, seed=self.seed)

    def _run_directly(
        self, rule: Rule, rates: Mapping[int, float], step: int, scale: Tensor | None, draw_noise: bool
    ) -> dict[str, Measured]:
        """Run a rule without a matrix form on whole particles, one group at a time. Nothing is measured."""
        for index in range(len(self.groups)):
            members = [piece for piece in self.pieces if piece.group == index]
            with torch.no_grad(), load_local(dict.fromkeys(piece.weight for piece in members), whole=True):
                theta = torch.cat([piece.theta() for piece in members], dim=-1)  # [M, D]
                grad = torch.cat([piece.grad() for piece in members], dim=-1)
                dtype = compute_dtype(theta)
                theta, grad = theta.to(dtype), grad.to(dtype) if scale is None else grad.to(dtype) / scale
                sigmas = self._sigmas(members, rule, rates, scale) if draw_noise else {}
                with full_precision(theta.device):
                    result = rule.direction(theta, grad, step)
                    sizes = [piece.slice.dim for piece in members]
                    for piece, heads in zip(members, result.split(sizes, -1), strict=True):
                        total = heads + self._noise(piece, heads, sigmas, step) if sigmas else heads
                        piece.put_grad(total if scale is None else total * scale)
        return {}


def _needs_whole(rule: Rule | None) -> bool:
    """Check whether a rule needs statistics of whole groups that cannot be summed over ranks, such as a median."""
    return rule is not None and rule.scales_noise


def _parameter_key(part: HeadSlice) -> tuple[int, str]:
    return id(part.module), part.attribute


def _split_by_size(items: Sequence[T], most: int, size: Callable[[T], int]) -> list[list[T]]:
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
