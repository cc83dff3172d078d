"""The reference update, in plain torch: reads particles, writes gradients.

A *block* is what one tensor operation works on: a single slice on the CPU, where a projection fits the cache and a
copy would cost more than a call; all slices of one shape, stacked, on a GPU, where calls are what costs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from repulsive.errors import UnsupportedWeights
from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.particles import noise as counters
from repulsive.particles.gram import Gram, apply_matrix, compute_dtype, full_precision, gram, wide_dtype
from repulsive.particles.rule import Coefficients, Measure, Rule
from repulsive.particles.sgld import SGLD

_PLAIN = SGLD(stepsize=1.0, temperature=0.0)  # the gradient itself: what a baseline is measured with


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

    def theta(self) -> Tensor:
        return self.slice.take(self.slice.parameter().detach())  # [M, D]

    def grad(self) -> Tensor:
        return self.slice.take(gradient_of(self.slice))  # [M, D]

    def put_grad(self, heads: Tensor) -> None:
        self.slice.put(gradient_of(self.slice), heads)

    def rate(self, rates: Mapping[int, float]) -> float:
        return rates.get(id(self.slice.parameter()), 0.0)

    def draw(self, like: Tensor, *, step: int, seed: int) -> Tensor:
        """Standard normal numbers keyed by (seed, step, group, element), [M, D]."""
        key = counters.key(seed, step, self.noise_name)
        return counters.normal(key, like.numel(), dtype=like.dtype, device=like.device).view_as(like)


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
        self.members = members
        parameter = pieces[0].slice.parameter()
        self.device = parameter.device
        self.heads = pieces[0].slice.num_heads
        position = {group: row for row, group in enumerate(members)}
        buckets: dict[object, list[Piece]] = defaultdict(list)
        for index, piece in enumerate(pieces):
            key = (piece.slice.dim, piece.slice.parameter().dtype)
            buckets[index if self.device.type == "cpu" else key].append(piece)
        self.blocks = [
            Block(bucket, torch.tensor([position[piece.group] for piece in bucket], device=self.device))
            for bucket in buckets.values()
        ]

    def products(self, read: Callable[[Piece], Tensor]) -> Tensor:
        """Gram matrices [groups, M + 1, M + 1]: products add up over the slices of a group."""
        size = (len(self.members), self.heads + 1, self.heads + 1)
        total = torch.zeros(size, dtype=wide_dtype(self.device), device=self.device)
        for block in self.blocks:
            total.index_add_(0, block.rows, gram(block.gather(read)).products)
        return total


class Reference:
    """The update of a fixed set of groups."""

    def __init__(self, groups: Sequence[HeadGroup], seed: int) -> None:
        self.groups = list(groups)
        self.seed = seed
        self.pieces = [
            Piece(index, part, f"{group.name}/{number}")
            for index, group in enumerate(groups)
            for number, part in enumerate(group.slices)
        ]
        kinds: dict[tuple[int, torch.device], list[int]] = defaultdict(list)
        for index, group in enumerate(groups):
            kinds[group.num_heads, group.slices[0].parameter().device].append(index)
        self.batches = [
            Batch(members, [piece for piece in self.pieces if piece.group in set(members)])
            for members in kinds.values()
        ]

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
            with torch.no_grad(), full_precision(batch.device):
                coefficients = self._coefficients(batch, rule or _PLAIN, step, scale, measure)
                if coefficients.measure is not None:
                    for row, index in enumerate(batch.members):
                        found[self.groups[index].name] = Measured(step, coefficients.measure, row)
                if rule is not None:
                    for block in batch.blocks:
                        self._write(block, rule, coefficients, rates, step, scale, draw_noise)
        return found

    def add_noise(self, rule: Rule, rates: Mapping[int, float], *, step: int) -> None:
        """Add a rule's noise to the parameters themselves: -lr * sigma * xi, what plain SGD would have made of it."""
        for piece in self.pieces:
            lr = piece.rate(rates)
            scale = lr * rule.noise_scale(lr)
            if scale:
                with torch.no_grad():
                    theta = piece.theta()
                    theta = theta.to(compute_dtype(theta))
                    noise = piece.draw(theta, step=step, seed=self.seed)
                    piece.slice.put(piece.slice.parameter().detach(), theta - scale * noise)

    def _coefficients(self, batch: Batch, rule: Rule, step: int, scale: Tensor | None, measure: bool) -> Coefficients:
        theta, grad = Gram(batch.products(Piece.theta)), None
        if measure or rule.needs_gradient_products:
            products = batch.products(Piece.grad)
            grad = Gram(products if scale is None else products / scale.to(products.dtype).square())
        return rule.coefficients(theta, grad, step=step)

    def _write(
        self,
        block: Block,
        rule: Rule,
        found: Coefficients,
        rates: Mapping[int, float],
        step: int,
        scale: Tensor | None,
        draw_noise: bool,
    ) -> None:
        grad = block.gather(Piece.grad)  # [pieces, M, D]
        result = found.drive[block.rows].to(grad.dtype) @ grad
        extra: Tensor | None = None  # what does not carry the gradients' scale
        if found.force is not None:
            extra = apply_matrix(found.force[block.rows], block.gather(Piece.theta))
        if draw_noise:
            noise = self._noise(block.pieces, rule, grad if scale is None else grad / scale, rates, step)
            if noise is not None:
                extra = noise if extra is None else extra + noise
        if extra is not None:
            result += extra if scale is None else extra * scale.to(extra.dtype)
        for piece, heads in zip(block.pieces, result, strict=True):
            piece.put_grad(heads)

    def _noise(
        self, pieces: Sequence[Piece], rule: Rule, grad: Tensor, rates: Mapping[int, float], step: int
    ) -> Tensor | None:
        """sigma * xi for every piece, [pieces, M, D]."""
        sigmas = [rule.noise_scale(piece.rate(rates)) for piece in pieces]
        if not any(sigmas):
            return None
        draws = [
            sigma * piece.draw(grad[0], step=step, seed=self.seed) for sigma, piece in zip(sigmas, pieces, strict=True)
        ]
        return rule.scale_noise(torch.stack(draws), grad)

    def _run_directly(
        self, rule: Rule, rates: Mapping[int, float], step: int, scale: Tensor | None, draw_noise: bool
    ) -> dict[str, Measured]:
        """For rules without a matrix form: whole particles, one group at a time, nothing measured."""
        for index in range(len(self.groups)):
            members = [piece for piece in self.pieces if piece.group == index]
            theta = torch.cat([piece.theta() for piece in members], dim=-1)  # [M, D]
            grad = torch.cat([piece.grad() for piece in members], dim=-1)
            dtype = compute_dtype(theta)
            theta, grad = theta.to(dtype), grad.to(dtype) if scale is None else grad.to(dtype) / scale
            with torch.no_grad(), full_precision(theta.device):
                result = rule.direction(theta, grad, step)
                sizes = [piece.slice.dim for piece in members]
                for piece, heads, own in zip(members, result.split(sizes, -1), grad.split(sizes, -1), strict=True):
                    noise = self._noise([piece], rule, own.unsqueeze(0), rates, step) if draw_noise else None
                    total = heads if noise is None else heads + noise[0]
                    piece.put_grad(total if scale is None else total * scale)
        return {}


def gradient_of(piece: HeadSlice) -> Tensor:
    """The gradient of a slice's parameter, dense and local, or an error that says which is not."""
    parameter = piece.parameter()
    grad = parameter.grad
    for tensor, what in ((parameter, "weight"), (grad, "gradient")):
        if tensor is not None and hasattr(tensor, "placements"):
            raise UnsupportedWeights(
                f"{piece.parameter_name}: its {what} is sharded ({tensor.placements}), which is not supported yet; "
                "train this model with DDP, or exclude the layer with `layers` or `match`"
            )
    if grad is None:
        raise UnsupportedWeights(f"{piece.parameter_name}: has no gradient")
    if grad.layout != torch.strided:
        raise UnsupportedWeights(f"{piece.parameter_name}: its gradient is {grad.layout}; repulsion needs a dense one")
    return grad
