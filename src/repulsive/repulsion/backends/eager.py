"""Eager update in plain torch: read particles, write gradients. It is the reference for the fused backend.

A *piece* is one parameter of a group: one slice, or one slice per module if the particles of a group are modules. A
*block* holds the pieces that one tensor operation works on. On the CPU that is a single piece: a projection fits the
cache, and stacking would cost more than a call. On a GPU, where calls are expensive, it is a stack of pieces of one
shape. Of sharded weights a block sees the columns that this rank works on, the same for every head.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from repulsive.heads.layout import HeadGroup, HeadSlice, stack_heads
from repulsive.particles import noise as counters
from repulsive.particles.gram import Gram, apply_matrix, compute_dtype, full_precision, gram, wide_dtype
from repulsive.particles.rule import Coefficients, Measure, Rule
from repulsive.particles.sgld import SGLD
from repulsive.repulsion.backends.inputs import StepInputs
from repulsive.repulsion.sharding.local_weights import LocalWeight, load_local, to_stored
from repulsive.repulsion.sharding.shard_layout import (
    MeshDims,
    has_heads_on_other_ranks,
    is_sharded,
    largest_share,
    local_size,
)

T = TypeVar("T")
Sigmas = dict[str, "float | Tensor"]  # by `Piece.noise_name`

_PLAIN = SGLD(stepsize=1.0, temperature=0.0)  # leaves the gradient unchanged, to measure training without a rule
MAX_BLOCK = 2**26  # elements of one block: half a gigabyte while its products are summed in float64
MAX_MOVED = 2**28  # bytes of weights and gradients that are moved here from other ranks at one time


class Measured(NamedTuple):
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
            for bucket in _split_by_size(alike, MAX_BLOCK, lambda piece: piece.size)
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


class EagerUpdate:
    """The update of a fixed set of groups, in plain torch.

    Args:
        groups: the groups.
        seed: seed of the noise.
    """

    def __init__(self, groups: Sequence[HeadGroup], seed: int) -> None:
        self.groups = list(groups)
        self.seed = seed
        parts = [(part, group.modules > 1) for group in groups for part in group.slices]
        weights = {_parameter_key(part): LocalWeight(part, idle) for part, idle in reversed(parts)}
        self.pieces = [
            Piece(index, run, f"{group.name}/{number}", tuple(weights[_parameter_key(part)] for part in run))
            for index, group in enumerate(groups)
            for number, run in enumerate(group.runs())
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
        return sum(2 * largest_share(part) * part.parameter().element_size() for part in parameters)

    def run(self, inputs: StepInputs) -> dict[str, Measured]:
        """Replace gradients by the direction of a rule; see `Update.run`."""
        rule, step, scale = inputs.rule, inputs.step, inputs.scale
        if rule is None and not inputs.measure:
            return {}
        if rule is not None and not rule.has_matrix_form:
            return self._run_directly(rule, inputs)
        measured: dict[str, Measured] = {}
        for batch in self.batches:
            local = load_local(batch.weights, whole=_needs_whole(rule), write=None if rule is None else "grad")
            with torch.no_grad(), full_precision(batch.device), local:
                coefficients = self._coefficients(batch, rule or _PLAIN, step, scale, inputs.measure)
                if coefficients.measure is not None:
                    for row, index in enumerate(batch.members):
                        measured[self.groups[index].name] = Measured(step, coefficients.measure, row)
                if rule is not None:
                    sigmas = self._sigmas(batch.pieces, rule, inputs.rates, scale) if inputs.draw_noise else {}
                    for block in batch.blocks:
                        self._write(block, rule, coefficients, sigmas, step, scale)
        return measured

    def add_noise(self, rule: Rule, rates: Mapping[int, float], *, step: int) -> None:
        """Add a rule's noise to the parameters themselves: -lr * sigma * xi, as a step of plain SGD would."""
        for pieces in _by_weights(self.pieces):
            first = pieces[0]
            lrs = [rates.get(id(part.parameter()), 0.0) for part in first.slices]
            scales = [lr * rule.noise_scale(lr) * (not w.is_idle) for lr, w in zip(lrs, first.weights, strict=True)]
            if any(scales):
                with torch.no_grad(), load_local(first.weights, gradients=False, write="theta"):
                    for piece in pieces:
                        theta = piece.theta()
                        theta = theta.to(compute_dtype(theta))
                        noise = piece.draw(theta, step=step, seed=self.seed)
                        piece.put_theta(theta - _per_head(scales, theta) * noise)

    def standard_noise(self, *, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter with standard normal numbers for the elements that this rank stores.

        Elements outside of heads are zero. The numbers are those of `add_noise`, in the dtype of computation.
        """
        for pieces in _by_weights(self.pieces):
            weights = pieces[0].weights
            with torch.no_grad(), load_local(weights, gradients=False, write=None):
                thetas = [weight.weights() for weight in weights]
                noises = [torch.zeros_like(theta, dtype=compute_dtype(theta)) for theta in thetas]
                for piece in pieces:
                    heads = stack_heads([part.take(x) for part, x in zip(piece.slices, noises, strict=True)])
                    drawn = piece.draw(heads, step=step, seed=self.seed)
                    sizes = [part.num_heads for part in piece.slices]
                    for part, noise, own in zip(piece.slices, noises, drawn.split(sizes), strict=True):
                        part.put(noise, own)
                stored = [to_stored(weight, noise) for weight, noise in zip(weights, noises, strict=True)]
            for part, weight, noise in zip(pieces[0].slices, weights, stored, strict=True):
                if not weight.is_idle:
                    yield part.parameter(), noise

    def add_to_gradients(self, rule: Rule, rates: Mapping[int, float], *, step: int, scale: Tensor | None) -> None:
        """Add a rule's noise to the gradients: sigma * xi."""
        sigmas = self._sigmas(self.pieces, rule, rates, scale)
        if not sigmas:
            return
        weights = dict.fromkeys(weight for piece in self.pieces for weight in piece.weights)
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
        scales = {piece.noise_name: piece.noise_scales(rule, rates) for piece in pieces}
        if not any(map(any, scales.values())):
            return {}
        like = pieces[0].slices[0].parameter()
        sigmas: Sigmas = {name: _per_head(factors, like) for name, factors in scales.items()}
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

    def _run_directly(self, rule: Rule, inputs: StepInputs) -> dict[str, Measured]:
        """Run a rule without a matrix form on whole particles, one group at a time. Nothing is measured."""
        step, scale = inputs.step, inputs.scale
        for index in range(len(self.groups)):
            members = [piece for piece in self.pieces if piece.group == index]
            weights = dict.fromkeys(weight for piece in members for weight in piece.weights)
            with torch.no_grad(), load_local(weights, whole=True):
                theta = torch.cat([piece.theta() for piece in members], dim=-1)  # [M, D]
                grad = torch.cat([piece.grad() for piece in members], dim=-1)
                dtype = compute_dtype(theta)
                theta, grad = theta.to(dtype), grad.to(dtype) if scale is None else grad.to(dtype) / scale
                sigmas = self._sigmas(members, rule, inputs.rates, scale) if inputs.draw_noise else {}
                with full_precision(theta.device):
                    result = rule.direction(theta, grad, step)
                    sizes = [piece.dim for piece in members]
                    for piece, heads in zip(members, result.split(sizes, -1), strict=True):
                        total = heads + self._noise(piece, heads, sigmas, step) if sigmas else heads
                        piece.put_grad(total if scale is None else total * scale)
        return {}


def _needs_whole(rule: Rule | None) -> bool:
    """Check whether a rule needs statistics of whole groups that cannot be summed over ranks, such as a median."""
    return rule is not None and rule.scales_noise


def _per_head(factors: Sequence[float], like: Tensor) -> float | Tensor:
    """Factors of the modules of a piece: one number if they are equal, otherwise [modules, 1]."""
    if len(set(factors)) == 1:
        return factors[0]
    return torch.tensor(factors, dtype=compute_dtype(like), device=like.device).unsqueeze(1)


def _by_weights(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Pieces that lie in the same parameters, such as q, k and v of a packed projection."""
    alike: dict[tuple[LocalWeight, ...], list[Piece]] = defaultdict(list)
    for piece in pieces:
        alike[piece.weights].append(piece)
    return list(alike.values())


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
