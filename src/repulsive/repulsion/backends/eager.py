"""Eager update in plain torch: read particles, write gradients. It is the reference for the fused backend.

For every group, grad <- A grad + s (B theta + sigma xi): A and B [M, M] are the coefficients of the rule, theta and
grad [M, D] the heads, xi standard normal noise, and s the loss scale, 1 without one. A rule without a matrix form
computes its direction from theta and grad themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from repulsive.heads.layout import HeadGroup, HeadSlice, stack_heads
from repulsive.particles.gram import Gram, apply_matrix, compute_dtype, full_precision
from repulsive.particles.rule import Coefficients, Rule
from repulsive.particles.sgld import SGLD
from repulsive.repulsion.backends.inputs import StepInputs
from repulsive.repulsion.backends.pieces import Batch, Block, Piece, split_by_size
from repulsive.repulsion.measured import Measured
from repulsive.repulsion.sharding.local_weights import LocalWeight, load_local, to_stored
from repulsive.repulsion.sharding.shard_layout import has_heads_on_other_ranks, largest_share

Sigmas = dict[str, "float | Tensor"]  # by `Piece.noise_name`

_PLAIN = SGLD(stepsize=1.0, temperature=0.0)  # leaves the gradient unchanged, to measure training without a rule
MAX_MOVED = 2**28  # bytes of weights and gradients that are moved here from other ranks at one time


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
        weights = {parameter_key(part): LocalWeight(part, idle) for part, idle in reversed(parts)}
        self.pieces = [
            Piece(index, run, f"{group.name}/{number}", tuple(weights[parameter_key(part)] for part in run))
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
            for some in (split_by_size(members, MAX_MOVED, self._bytes_moved) if is_moved else [members])
        ]

    def _bytes_moved(self, index: int) -> int:
        """Count the bytes of weights and gradients that one group moves to this rank from other ranks."""
        parameters = {parameter_key(part): part for part in self.groups[index].slices}.values()
        return sum(2 * largest_share(part) * part.parameter().element_size() for part in parameters)

    def run(self, inputs: StepInputs) -> list[Measured]:
        """Replace gradients by the direction of a rule; see `Update.run`."""
        rule, step, scale = inputs.rule, inputs.step, inputs.scale
        if rule is None and not inputs.measure:
            return []
        if rule is not None and not rule.has_matrix_form:
            return self._run_directly(rule, inputs)
        measured: list[Measured] = []
        for batch in self.batches:
            local = load_local(batch.weights, whole=_needs_whole(rule), write=None if rule is None else "grad")
            with torch.no_grad(), full_precision(batch.device), local:
                coefficients = self._coefficients(batch, rule or _PLAIN, step, scale, inputs.measure)
                if coefficients.measure is not None:
                    rows = {self.groups[index].name: row for row, index in enumerate(batch.members)}
                    measured.append(Measured.of(step, rows, coefficients.measure))
                if rule is not None:
                    sigmas = self._sigmas(batch.pieces, rule, inputs.rates, scale) if inputs.draw_noise else {}
                    for block in batch.blocks:
                        self._write(block, coefficients, sigmas, step, scale)
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

    def _write(self, block: Block, coefficients: Coefficients, sigmas: Sigmas, step: int, scale: Tensor | None) -> None:
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

    def _run_directly(self, rule: Rule, inputs: StepInputs) -> list[Measured]:
        """Run a rule without a matrix form on whole particles, one group at a time."""
        measured = [self._run_group(index, rule, inputs) for index in range(len(self.groups))]
        return [one for one in measured if one is not None]

    @torch.no_grad()
    def _run_group(self, index: int, rule: Rule, inputs: StepInputs) -> Measured | None:
        step, scale, measure = inputs.step, inputs.scale, None
        members = [piece for piece in self.pieces if piece.group == index]
        weights = dict.fromkeys(weight for piece in members for weight in piece.weights)
        with load_local(weights, whole=True):
            theta = torch.cat([piece.theta() for piece in members], dim=-1)  # [M, D]
            grad = torch.cat([piece.grad() for piece in members], dim=-1)
            dtype = compute_dtype(theta)
            theta, grad = theta.to(dtype), grad.to(dtype) if scale is None else grad.to(dtype) / scale
            sigmas = self._sigmas(members, rule, inputs.rates, scale) if inputs.draw_noise else {}
            with full_precision(theta.device):
                if inputs.measure:
                    results, measure = rule.measured_direction(theta.unsqueeze(0), grad.unsqueeze(0), step)
                    result = results[0]
                else:
                    result = rule.direction(theta, grad, step)
                sizes = [piece.dim for piece in members]
                for piece, heads in zip(members, result.split(sizes, -1), strict=True):
                    total = heads + self._noise(piece, heads, sigmas, step) if sigmas else heads
                    piece.put_grad(total if scale is None else total * scale)
        return None if measure is None else Measured.of(step, {self.groups[index].name: 0}, measure)


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


def parameter_key(part: HeadSlice) -> tuple[int, str]:
    """Identify the parameter of a slice, also after a wrapper has replaced the tensor."""
    return id(part.module), part.attribute
