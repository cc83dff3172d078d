"""The reference update, in plain torch: reads particles, writes gradients.

A *block* is what one tensor operation works on: a single slice on the CPU, where a projection fits the cache and a
copy would cost more than a call; slices of one shape, stacked, on a GPU, where calls are what costs. Of weights that
lie on several ranks a block sees what `shares` bring here: the same columns of every head.
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
from repulsive.repulsion.sharding.local import Share, opened
from repulsive.repulsion.sharding.parts import Sums, is_sharded, local_size, moves

T = TypeVar("T")
Sigmas = dict[str, "float | Tensor"]  # by the name of a piece's noise

_PLAIN = SGLD(stepsize=1.0, temperature=0.0)  # the gradient itself: what a baseline is measured with
LARGEST = 2**26  # numbers of one block: half a gigabyte while its products are summed in float64
HELD = 2**28  # bytes of weights and gradients brought here from other ranks at one time


@dataclass(frozen=True)
class Measured:
    """One group's row in a measurement of several; numbers stay on their device until someone looks."""

    step: int
    measure: Measure
    row: int

    def values(self) -> dict[str, float]:
        """Every field of the measure as a number."""
        tensors: dict[str, Tensor] = vars(self.measure)
        return {name: float(value[self.row]) for name, value in tensors.items()}


@dataclass(frozen=True)
class Piece:
    """One slice of one group, which is number `group` of the update's groups."""

    group: int
    slice: HeadSlice
    noise_name: str
    share: Share

    def theta(self) -> Tensor:
        assert self.share.theta is not None
        return self.slice.take(self.share.theta)  # [M, D], or the part of D that is worked on here

    def grad(self) -> Tensor:
        assert self.share.grad is not None
        return self.slice.take(self.share.grad)  # [M, D]

    def put_theta(self, heads: Tensor) -> None:
        assert self.share.theta is not None
        self.slice.put(self.share.theta, heads)

    def put_grad(self, heads: Tensor) -> None:
        assert self.share.grad is not None
        self.slice.put(self.share.grad, heads)

    def rate(self, rates: Mapping[int, float]) -> float:
        return rates.get(id(self.slice.parameter()), 0.0)

    def draw(self, like: Tensor, *, step: int, seed: int) -> Tensor:
        """Standard normal numbers keyed by (seed, step, group, element), [M, D]."""
        key = counters.key(seed, step, self.noise_name)
        elements = self.share.elements(self.slice)
        return counters.normal(key, elements, dtype=like.dtype, device=like.device).view_as(like)

    def alike(self) -> tuple[object, ...]:
        """What pieces of one block have in common."""
        parameter = self.slice.parameter()
        if not is_sharded(parameter):
            return (self.slice.dim, parameter.dtype)
        where = (parameter.device_mesh, tuple(parameter.placements), parameter.shape, self.slice.axis)
        return (self.slice.dim, parameter.dtype, *where)


@dataclass(frozen=True)
class Block:
    """Pieces that go through one call, and the rows of their groups in the batch of groups with equally many heads."""

    pieces: list[Piece]
    rows: Tensor

    def gather(self, read: Callable[[Piece], Tensor]) -> Tensor:
        """[pieces, M, D] in the dtype of computation."""
        parts = [read(piece) for piece in self.pieces]
        stacked = parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)
        return stacked.to(compute_dtype(stacked))


class Batch:
    """Groups with equally many heads on one device: their coefficients are one call."""

    def __init__(self, members: list[int], pieces: Sequence[Piece]) -> None:
        self.members, self.pieces = members, pieces
        parameter = pieces[0].slice.parameter()
        self.device = parameter.device
        self.heads = pieces[0].slice.num_heads
        position = {group: row for row, group in enumerate(members)}
        self.shares = list(dict.fromkeys(piece.share for piece in pieces))
        buckets: dict[object, list[Piece]] = defaultdict(list)
        for index, piece in enumerate(pieces):
            buckets[index if self.device.type == "cpu" else piece.alike()].append(piece)
        self.blocks = [
            Block(bucket, torch.tensor([position[piece.group] for piece in bucket], device=self.device))
            for alike in buckets.values()
            for bucket in _runs(alike, LARGEST, lambda piece: local_size(piece.slice))
        ]

    def products(self, *reads: Callable[[Piece], Tensor]) -> Tensor:
        """Gram matrices [reads, groups, M + 1, M + 1]: products add up over the slices of a group, and over ranks."""
        size = (len(reads), len(self.members), self.heads + 1, self.heads + 1)
        totals: dict[Sums, Tensor] = {}  # by what to sum over, nearly always one entry
        for block in self.blocks:
            sums = block.pieces[0].share.sums
            if sums not in totals:
                totals[sums] = torch.zeros(size, dtype=wide_dtype(self.device), device=self.device)
            for total, read in zip(totals[sums], reads, strict=True):
                total.index_add_(0, block.rows, gram(block.gather(read)).products)
        for sums, total in totals.items():
            for mesh, dim in sums:
                torch.distributed.all_reduce(total, group=mesh.get_group(dim))
        return torch.stack(list(totals.values())).sum(0)


class Reference:
    """The update of a fixed set of groups."""

    def __init__(self, groups: Sequence[HeadGroup], seed: int) -> None:
        self.groups = list(groups)
        self.seed = seed
        parts = [(index, number, part) for index, g in enumerate(groups) for number, part in enumerate(g.slices)]
        shares = {_owner(part): Share(part) for _, _, part in reversed(parts)}  # one per parameter
        self.pieces = [
            Piece(index, part, f"{groups[index].name}/{number}", shares[_owner(part)]) for index, number, part in parts
        ]
        kinds: dict[tuple[int, torch.device, bool], list[int]] = defaultdict(list)
        for index, group in enumerate(groups):
            travels = any(moves(part) for part in group.slices)
            kinds[group.num_heads, group.slices[0].parameter().device, travels].append(index)
        self.batches = [
            Batch(run, [piece for piece in self.pieces if piece.group in set(run)])
            for (_, _, travels), members in kinds.items()
            for run in (_runs(members, HELD, self._held) if travels else [members])
        ]

    def _held(self, index: int) -> int:
        """Bytes of weights and gradients to bring here for one group."""
        parameters = {_owner(part): part for part in self.groups[index].slices}.values()
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
        """Replace gradients by what `rule` makes of them; see `Update.run`."""
        if rule is None and not measure:
            return {}
        if rule is not None and not rule.has_matrix_form:
            return self._run_directly(rule, rates, step, scale, draw_noise)
        found: dict[str, Measured] = {}
        for batch in self.batches:
            writing = opened(batch.shares, whole=_needs_whole(rule), write=None if rule is None else "grad")
            with torch.no_grad(), full_precision(batch.device), writing:
                coefficients = self._coefficients(batch, rule or _PLAIN, step, scale, measure)
                if coefficients.measure is not None:
                    for row, index in enumerate(batch.members):
                        found[self.groups[index].name] = Measured(step, coefficients.measure, row)
                if rule is not None:
                    sigmas = self._sigmas(batch.pieces, rule, rates, scale) if draw_noise else {}
                    for block in batch.blocks:
                        self._write(block, rule, coefficients, sigmas, step, scale)
        return found

    def add_noise(self, rule: Rule, rates: Mapping[int, float], *, step: int) -> None:
        """Add a rule's noise to the parameters themselves: -lr * sigma * xi, what plain SGD would have made of it."""
        by_share: dict[Share, list[Piece]] = defaultdict(list)
        for piece in self.pieces:
            by_share[piece.share].append(piece)
        for share, pieces in by_share.items():
            lr = pieces[0].rate(rates)
            scale = lr * rule.noise_scale(lr)
            if scale:
                with torch.no_grad(), opened([share], gradients=False, write="theta"):
                    for piece in pieces:
                        theta = piece.theta()
                        theta = theta.to(compute_dtype(theta))
                        piece.put_theta(theta - scale * piece.draw(theta, step=step, seed=self.seed))

    def add_to_gradients(self, rule: Rule, rates: Mapping[int, float], *, step: int, scale: Tensor | None) -> None:
        """Add a rule's noise to the gradients: sigma * xi."""
        sigmas = self._sigmas(self.pieces, rule, rates, scale)
        if not sigmas:
            return
        with torch.no_grad(), opened(dict.fromkeys(piece.share for piece in self.pieces), whole=_needs_whole(rule)):
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
        found: Coefficients,
        sigmas: Sigmas,
        step: int,
        scale: Tensor | None,
    ) -> None:
        grad = block.gather(Piece.grad)  # [pieces, M, D]
        result = found.drive[block.rows].to(grad.dtype) @ grad
        extra: Tensor | None = None  # what does not carry the gradients' scale
        if found.force is not None:
            extra = apply_matrix(found.force[block.rows], block.gather(Piece.theta))
        if sigmas:
            noise = torch.stack([self._noise(piece, grad[0], sigmas, step) for piece in block.pieces])
            extra = noise if extra is None else extra + noise
        if extra is not None:
            result += extra if scale is None else extra * scale.to(extra.dtype)
        for piece, heads in zip(block.pieces, result, strict=True):
            piece.put_grad(heads)

    def _sigmas(self, pieces: Sequence[Piece], rule: Rule, rates: Mapping[int, float], scale: Tensor | None) -> Sigmas:
        """What the noise of every piece of whole groups is multiplied with; nothing where there is no noise."""
        if not rates:
            return {}
        found: Sigmas = {piece.noise_name: rule.noise_scale(piece.rate(rates)) for piece in pieces}
        if not any(found.values()):
            return {}
        if rule.scales_noise:
            groups: dict[int, list[Piece]] = defaultdict(list)
            for piece in pieces:
                groups[piece.group].append(piece)
            for members in groups.values():
                grad = torch.cat([piece.grad() for piece in members], dim=-1)  # [M, D]
                grad = grad.to(compute_dtype(grad))
                factor = rule.noise_factor(grad if scale is None else grad / scale)
                found |= {piece.noise_name: found[piece.noise_name] * factor for piece in members}
        return found

    def _noise(self, piece: Piece, like: Tensor, sigmas: Sigmas, step: int) -> Tensor:
        """sigma * xi, [M, D]."""
        return sigmas[piece.noise_name] * piece.draw(like, step=step, seed=self.seed)

    def _run_directly(
        self, rule: Rule, rates: Mapping[int, float], step: int, scale: Tensor | None, draw_noise: bool
    ) -> dict[str, Measured]:
        """For rules without a matrix form: whole particles, one group at a time, nothing measured."""
        for index in range(len(self.groups)):
            members = [piece for piece in self.pieces if piece.group == index]
            with torch.no_grad(), opened(dict.fromkeys(piece.share for piece in members), whole=True):
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
    """Whether a rule looks at a group in ways that do not add up over ranks, such as a median of its numbers."""
    return rule is not None and rule.scales_noise


def _owner(part: HeadSlice) -> tuple[int, str]:
    return id(part.module), part.attribute


def _runs(items: Sequence[T], most: int, size: Callable[[T], int]) -> list[list[T]]:
    """Consecutive items, cut so that the sizes of one run add up to at most `most`; one item always fits."""
    runs: list[list[T]] = []
    room = 0
    for item in items:
        if not runs or size(item) > room:
            runs.append([])
            room = most
        runs[-1].append(item)
        room -= size(item)
    return runs
