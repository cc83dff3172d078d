"""The one place that reads particles and writes gradients.

A *block* is what one tensor operation works on: a single slice on the CPU, where a projection fits the cache and a
copy would cost more than a call; all slices of one shape, stacked, on a GPU, where calls are what costs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from repulsive.errors import UnsupportedWeights
from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.particles import noise as counters
from repulsive.particles.gram import Gram, apply_matrix, compute_dtype, full_precision, gram
from repulsive.particles.rule import Coefficients, Measure, Rule
from repulsive.particles.sgld import SGLD

_PLAIN = SGLD(stepsize=1.0, temperature=0.0)  # the gradient itself: what a baseline is measured with


@dataclass(frozen=True)
class Piece:
    """One slice of one group: `group` indexes the groups of this update, `lr` is its parameter's learning rate."""

    group: int
    slice: HeadSlice
    noise_name: str
    lr: float

    def theta(self) -> Tensor:
        return self.slice.take(self.slice.parameter().detach())  # [M, D]

    def grad(self) -> Tensor:
        return self.slice.take(gradient_of(self.slice))  # [M, D]


@dataclass(frozen=True)
class Block:
    """Pieces that go through one call."""

    pieces: list[Piece]

    def gather(self, read: Callable[[Piece], Tensor]) -> Tensor:
        """[pieces, M, D] in the dtype of computation."""
        parts = [read(piece) for piece in self.pieces]
        stacked = parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)
        return stacked.to(compute_dtype(stacked))


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


def make_blocks(pieces: Sequence[Piece]) -> list[Block]:
    """Group pieces into calls."""
    buckets: dict[object, list[Piece]] = defaultdict(list)
    for index, piece in enumerate(pieces):
        parameter = piece.slice.parameter()
        shape = (piece.slice.num_heads, piece.slice.dim, parameter.dtype, parameter.device)
        buckets[index if parameter.device.type == "cpu" else shape].append(piece)
    return [Block(bucket) for bucket in buckets.values()]


def products(blocks: Sequence[Block], read: Callable[[Piece], Tensor], groups: Sequence[HeadGroup]) -> list[Tensor]:
    """Gram matrices [M + 1, M + 1] of each group: products add up over the slices of a group."""
    total: list[Tensor | None] = [None] * len(groups)
    for block in blocks:
        found = gram(block.gather(read)).products  # [pieces, M + 1, M + 1]
        for piece, matrix in zip(block.pieces, found, strict=True):
            so_far = total[piece.group]
            total[piece.group] = matrix if so_far is None else so_far + matrix
    return [matrix for matrix in total if matrix is not None]


def solve(rule: Rule, theta: list[Tensor], grad: list[Tensor] | None, step: int) -> list[Coefficients]:
    """The coefficients of every group; groups with equally many heads are one call."""
    by_heads: dict[tuple[int, torch.device], list[int]] = defaultdict(list)
    for index, matrix in enumerate(theta):
        by_heads[matrix.shape[-1], matrix.device].append(index)
    found: dict[int, Coefficients] = {}
    for members in by_heads.values():
        grad_gram = None if grad is None else Gram(torch.stack([grad[i] for i in members]))
        batch = rule.coefficients(Gram(torch.stack([theta[i] for i in members])), grad_gram, step=step)
        for row, index in enumerate(members):
            found[index] = Coefficients(
                batch.drive[row],
                None if batch.force is None else batch.force[row],
                None if batch.measure is None else Measure(*(value[row] for value in vars(batch.measure).values())),
            )
    return [found[index] for index in range(len(theta))]


def update(
    groups: Sequence[HeadGroup],
    pieces: Sequence[Piece],
    rule: Rule | None,
    *,
    step: int,
    seed: int,
    scale: Tensor | None = None,
    measure: bool = False,
    draw_noise: bool = True,
) -> list[Measure | None]:
    """Replace the gradients of `groups` by what `rule` makes of them.

    Args:
        groups: the groups of this update.
        pieces: their slices.
        rule: what to do; None leaves gradients as they are, and only measures.
        step: optimiser steps taken so far.
        seed: of the noise.
        scale: what gradients are multiplied with right now (AMP under a fused optimiser).
        measure: also measure drive, repulsion, bandwidth and distance.
        draw_noise: False where the noise is added to parameters instead.

    Returns:
        One `Measure` per group, or None where not measured.
    """
    if rule is None and not measure:
        return [None] * len(groups)
    if rule is not None and not rule.has_matrix_form:
        return _update_directly(groups, pieces, rule, step=step, seed=seed, scale=scale, draw_noise=draw_noise)
    blocks = make_blocks(pieces)
    with torch.no_grad(), full_precision(pieces[0].slice.parameter().device):
        theta = products(blocks, Piece.theta, groups)
        needed = measure or (rule is not None and rule.needs_gradient_products)
        grad = products(blocks, Piece.grad, groups) if needed else None
        if grad is not None and scale is not None:
            grad = [matrix / scale.to(matrix.dtype).square() for matrix in grad]
        found = solve(rule or _PLAIN, theta, grad, step)
        if rule is not None:
            for block in blocks:
                _write(block, rule, found, step=step, seed=seed, scale=scale, draw_noise=draw_noise)
    return [coefficients.measure for coefficients in found]


def _update_directly(
    groups: Sequence[HeadGroup],
    pieces: Sequence[Piece],
    rule: Rule,
    *,
    step: int,
    seed: int,
    scale: Tensor | None,
    draw_noise: bool,
) -> list[Measure | None]:
    """For rules without a matrix form: whole particles, one group at a time, nothing measured."""
    for index in range(len(groups)):
        members = [piece for piece in pieces if piece.group == index]
        theta = torch.cat([Block([piece]).gather(Piece.theta)[0] for piece in members], dim=-1)  # [M, D]
        grad = torch.cat([Block([piece]).gather(Piece.grad)[0] for piece in members], dim=-1)
        if scale is not None:
            grad = grad / scale
        with torch.no_grad(), full_precision(theta.device):
            result = rule.direction(theta, grad, step)
            sizes = [piece.slice.dim for piece in members]
            for piece, heads, own in zip(members, result.split(sizes, -1), grad.split(sizes, -1), strict=True):
                noise = _noise(Block([piece]), rule, own.unsqueeze(0), step=step, seed=seed) if draw_noise else None
                total = heads if noise is None else heads + noise[0]
                piece.slice.put(gradient_of(piece.slice), total if scale is None else total * scale)
    return [None] * len(groups)


def _write(
    block: Block, rule: Rule, found: list[Coefficients], *, step: int, seed: int, scale: Tensor | None, draw_noise: bool
) -> None:
    grad = block.gather(Piece.grad)  # [pieces, M, D]
    drive = torch.stack([found[piece.group].drive for piece in block.pieces])
    result = drive.to(grad.dtype) @ grad
    extra: Tensor | None = None  # what does not carry the gradients' scale
    forces = [force for piece in block.pieces if (force := found[piece.group].force) is not None]
    if forces:
        extra = apply_matrix(torch.stack(forces), block.gather(Piece.theta))
    if draw_noise:
        noise = _noise(block, rule, grad if scale is None else grad / scale, step=step, seed=seed)
        if noise is not None:
            extra = noise if extra is None else extra + noise
    if extra is not None:
        result += extra if scale is None else extra * scale.to(extra.dtype)
    for piece, heads in zip(block.pieces, result, strict=True):
        piece.slice.put(gradient_of(piece.slice), heads)


def _noise(block: Block, rule: Rule, grad: Tensor, *, step: int, seed: int) -> Tensor | None:
    """sigma * xi for every piece [pieces, M, D], keyed by (seed, step, group, element)."""
    if not any(rule.noise_scale(piece.lr) for piece in block.pieces):
        return None
    noise = torch.stack(
        [rule.noise_scale(piece.lr) * draw(piece, step=step, seed=seed, like=grad[0]) for piece in block.pieces]
    )
    return rule.scale_noise(noise, grad)


def draw(piece: Piece, *, step: int, seed: int, like: Tensor) -> Tensor:
    """Standard normal numbers for one slice, [M, D]."""
    numbers = counters.normal(
        counters.key(seed, step, piece.noise_name), like.numel(), dtype=like.dtype, device=like.device
    )
    return numbers.view_as(like)


@torch.no_grad()
def add_noise(pieces: Sequence[Piece], rule: Rule, *, step: int, seed: int) -> None:
    """Add a rule's noise to the parameters themselves: -lr * sigma * xi, what plain SGD would have made of it."""
    for piece in pieces:
        scale = piece.lr * rule.noise_scale(piece.lr)
        if scale:
            parameter = piece.slice.parameter().detach()
            theta = Block([piece]).gather(Piece.theta)[0]
            piece.slice.put(parameter, theta - scale * draw(piece, step=step, seed=seed, like=theta))
