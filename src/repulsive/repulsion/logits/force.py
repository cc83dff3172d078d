"""Compute the force between the attention logits of heads from sampled tokens, and pull it back to weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from repulsive.particles.gram import compute_dtype, matmul_precision
from repulsive.particles.logits import Circuits, centre_keys, cosines, function_gram, mean_and_largest
from repulsive.particles.rule import mean_distance
from repulsive.particles.svgd import SVGD
from repulsive.repulsion.logits.norms import stack_formulas
from repulsive.repulsion.logits.projections import CircuitLayer, LogitLayer, Projection
from repulsive.repulsion.logits.samples import Sample

LARGEST = 2**28  # largest number of bytes of second moments, and of matrices that centre keys, at a time


class ForceNumbers:
    """Scalars of the forces of several layers, one tensor [L] each. Those for reports are computed when first needed.

    Args:
        layers: the layer numbers.
        alpha: repulsive weights.
        norm: norms of the forces.
        bandwidth: bandwidths of the kernel.
        products: inner products of the functions of heads, [L, M, M].
    """

    def __init__(
        self, layers: Sequence[int], alpha: Tensor, norm: Tensor, bandwidth: Tensor, products: Tensor | None
    ) -> None:
        self.layers = tuple(layers)
        self._first = (alpha, norm, bandwidth)
        self._products = products
        self._rest: tuple[Tensor, ...] | None = None

    @classmethod
    def saved(cls, layer: int, values: Tensor) -> ForceNumbers:
        """Restore the numbers of one layer from the six numbers in `values`."""
        alpha, norm, bandwidth, *rest = values.unsqueeze(1).unbind(0)
        numbers = cls((layer,), alpha, norm, bandwidth, None)
        numbers._rest = tuple(rest)
        return numbers

    @property
    def values(self) -> tuple[Tensor, ...]:
        """Weight, norm, bandwidth, mean distance between unit functions, mean and largest cosine, [L] each."""
        if self._rest is None:
            assert self._products is not None
            distance = mean_distance(unit_distances(self._products))
            self._rest = (distance, *mean_and_largest(cosines(self._products)))
            self._products = None
        return (*self._first, *self._rest)

    @property
    def norm(self) -> Tensor:
        """Norms of the forces, [L]."""
        return self._first[1]

    def other_numbers(self) -> Tensor:
        """Return the numbers for a report beside drive and repulsion, [L, 5], in the order of `Measure`."""
        alpha, _, bandwidth, distance, *cosines = self.values
        return torch.stack([bandwidth, distance, alpha, *cosines], dim=1)


@dataclass(frozen=True)
class LayerForce:
    """The force that is added to the gradients of one layer's heads, with its measurements.

    Args:
        parts: for each of the layer's sides (such as q and k), one tensor per target parameter: [M, rows, columns], or
            [M, rows] for a bias.
        numbers: scalars of the forces of this layer and others.
        row: row of this layer in `numbers`.
    """

    parts: tuple[tuple[Tensor, ...], ...]
    numbers: ForceNumbers
    row: int


def logit_forces(
    layers: Sequence[CircuitLayer],
    samples: Mapping[tuple[int, str], Sample],
    rule: SVGD,
    *,
    step: int = 0,
    drives: Tensor | None = None,
) -> dict[int, LayerForce]:
    """Compute the force between heads' logits, by layer number, for every layer that has samples of q and k.

    Layers of equal shape are computed together.

    Args:
        layers: the attention layers; only `LogitLayer` is used.
        samples: samples by layer number and projection part ("q" or "k").
        rule: a rule with `space="logits"`.
        step: number of optimizer steps taken so far, for schedules.
        drives: |drive| of every layer [layers], for `alpha="auto"`.
    """
    by_shape: dict[tuple[object, ...], list[int]] = defaultdict(list)
    logits = {number: layer for number, layer in enumerate(layers) if isinstance(layer, LogitLayer)}
    for number, layer in logits.items():
        if (number, "q") in samples and (number, "k") in samples:
            by_shape[_shape(number, layer, samples)].append(number)
    forces: dict[int, LayerForce] = {}
    for members in by_shape.values():
        first = samples[members[0], "q"]
        size = 2 * first.outputs[0].numel() ** 2 * 4 + _bytes_to_centre(samples[members[0], "k"])
        most = max(1, LARGEST // size)
        for start in range(0, len(members), most):
            chunk = members[start : start + most]
            with torch.no_grad(), _precision(first.outputs):
                forces |= _force_of_equal_shapes(chunk, logits, samples, rule, step, drives)
    return forces


def _shape(number: int, layer: LogitLayer, samples: Mapping[tuple[int, str], Sample]) -> tuple[object, ...]:
    """Return a key that is equal for layers that can be computed together."""
    q, k = samples[number, "q"], samples[number, "k"]
    sizes = [tuple(x.shape) for s in (q, k) for x in (*s.inputs, s.outputs)]
    targets = tuple(tuple((t.factor, t.is_bias) for t in p.targets) for p in (layer.query, layer.key))
    changes = tuple((None if s.norm is None else s.norm.kind, s.clip) for s in (q, k))
    of_tokens = q.is_full, k.is_full, k.count, q.outputs.dtype, q.outputs.device
    return (layer.reads, *sizes, targets, changes, *of_tokens)


def _force_of_equal_shapes(
    members: Sequence[int],
    layers: Mapping[int, LogitLayer],
    samples: Mapping[tuple[int, str], Sample],
    rule: SVGD,
    step: int,
    drives: Tensor | None,
) -> dict[int, LayerForce]:
    query, key = ([samples[number, part] for number in members] for part in ("q", "k"))
    dtype = compute_dtype(query[0].outputs)
    raw_q, raw_k = (stacked_outputs(side, dtype) for side in (query, key))  # [L, N, M, d]
    weights_q, weights_k = (_stack([s.weights for s in side]).to(dtype) for side in (query, key))  # [L or 1, N]
    with torch.enable_grad():
        q, k = changed(raw_q, query), changed(raw_k, key)
        q = q if all(s.is_full for s in query) else q * weights_q[..., None, None]
        if all(s.is_full for s in key):
            k = centre_keys(k.unflatten(1, (key[0].count, -1))).flatten(1, 2)
        else:
            k = _centred(k, weights_k, _stack([s.sequences for s in key]), key[0].count, key[0].ranks)
    circuits = Circuits(q.detach(), k.detach(), right_of=layers[members[0]].reads)
    moments = circuits.moments()
    products = (moments[0] * moments[1]).sum((-3, -1))  # [L, M, M]
    gram = function_gram(_nonzero(products))
    interaction = rule.interact(gram)
    unit = -rule.force_scale(gram.num_particles) * interaction.repulsion  # negative: the optimizer descends it
    push_q, push_k = circuits.pull_back(unit, moments)  # [L, N, M, d], [L, N, M_k, d]
    is_none = circuits.are_rounding_errors((push_q, push_k), unit, moments, rounding_of_layers(query))
    if raw_q.requires_grad:
        (push_q,) = torch.autograd.grad(q, raw_q, push_q)
    if raw_k.requires_grad:
        (push_k,) = torch.autograd.grad(k, raw_k, push_k)
    on_query = to_targets(push_q, query, [layers[number].query for number in members])
    on_key = to_targets(push_k, key, [layers[number].key for number in members])
    norms = torch.stack([torch.linalg.vector_norm(f.flatten(1), dim=1) for f in (*on_query, *on_key)])
    norms = torch.linalg.vector_norm(norms, dim=0)  # [L]
    drive = None if drives is None else rows_of(drives, members).to(norms)
    alpha = torch.where(is_none, 0.0, rule.weight_of(step, drive, norms))
    query_parts, key_parts = (
        [(f * alpha.to(f.dtype).view(-1, *[1] * (f.ndim - 1))).unbind(0) for f in side] for side in (on_query, on_key)
    )
    numbers = ForceNumbers(members, alpha, alpha * norms, interaction.bandwidth, products)
    return {
        number: LayerForce((tuple(part[i] for part in query_parts), tuple(part[i] for part in key_parts)), numbers, i)
        for i, number in enumerate(members)
    }


def stacked_outputs(samples: Sequence[Sample], dtype: torch.dtype) -> Tensor:
    """Stack the projected tokens of several layers, [L, N, M, d]; with gradients if a norm or clipping follows."""
    raw = _stack([sample.outputs for sample in samples]).to(dtype)
    return raw.detach().requires_grad_() if samples[0].is_changed else raw


def changed(raw: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Apply the norms and the clipping that follow the projections, [L, N, M, d]."""
    norms = [sample.norm for sample in samples if sample.norm is not None]
    x = stack_formulas(norms)(raw) if norms else raw
    clip = samples[0].clip
    return x if clip is None else x.clamp(-clip, clip)


def _nonzero(products: Tensor) -> Tensor:
    """Replace the products of layers whose logits are all zero by those of different heads.

    Zero functions would be reported as equal heads. The force on their weights is zero in any case. On a GPU nothing is
    reported here, so nothing is replaced.
    """
    if products.device.type != "cpu":
        return products
    is_zero = (products == 0).all(-1).all(-1)[..., None, None]
    return torch.where(is_zero, torch.eye(products.shape[-1], dtype=products.dtype, device="cpu"), products)


def _stack(tensors: list[Tensor]) -> Tensor:
    """Stack tensors; the same tensor several times becomes one row, [1, ...]."""
    first = tensors[0]
    return first.unsqueeze(0) if all(tensor is first for tensor in tensors) else torch.stack(tensors)


def rows_of(values: Tensor, numbers: Sequence[int]) -> Tensor:
    """Select rows without copying an index to the device."""
    if list(numbers) == list(range(len(values))):
        return values
    return torch.stack([values[number] for number in numbers])


def _centred(keys: Tensor, weights: Tensor, sequences: Tensor, count: int, ranks: int) -> Tensor:
    """Subtract the mean key of each sequence; tokens of weight 0 become zero: [L, N, M, d].

    Every rank has its own sequences. A sum by index would depend on the order of additions on a GPU, and ranks would
    get different forces.
    """
    keys, weights, sequences = (x.unflatten(1, (ranks, -1)) for x in (keys, weights, sequences))  # [L, R, n, ...]
    member = sequences[..., None] == torch.arange(count, device=sequences.device)
    member = member.to(keys.dtype) * weights[..., None]  # [L, R, n, S]
    flat = keys.flatten(3)
    means = (member.mT @ flat) / member.sum(2).clamp(min=1)[..., None]  # [L, R, S, M d]
    return ((flat - member @ means) * weights[..., None]).view_as(keys).flatten(1, 2)


def _bytes_to_centre(key: Sample) -> int:
    """Return the memory of `_centred` for one layer, which grows with tokens x sequences of a rank."""
    return 0 if key.is_full else 8 * len(key.weights) * key.count


def to_targets(push: Tensor, samples: Sequence[Sample], projections: Sequence[Projection]) -> list[Tensor]:
    """Pull the force on projected tokens back to each parameter: [L, M, rows, columns], [L, M, rows] for a bias."""
    first = projections[0]
    rows, width = first.targets[0].slice.rows.shape[1], first.width
    flat = push.flatten(2)  # [L, N, M d]
    forces, place = [], 0
    for number, target in enumerate(first.targets):
        if target.is_bias:
            force = push.sum(1)  # [L, M, d]
        else:
            x = _stack([s.inputs[place] for s in samples]).to(push.dtype)  # [L, N, D_in]
            place += 1
            force = (flat.mT @ x).unflatten(1, push.shape[-2:])  # [L, M, d, D_in]
        if width < rows:  # the other rows are for positions and do not enter these logits
            force = torch.nn.functional.pad(force, (*(0, 0) * (force.ndim - 3), 0, rows - width))
        factors = [projection.targets[number].factor for projection in projections]
        forces.append(force if all(f == 1 for f in factors) else force * factors[0])
    return forces


def unit_distances(products: Tensor) -> Tensor:
    """Compute squared distances between functions normalised to length 1, [..., M, M]."""
    return (2 - 2 * cosines(products)).clamp(min=0) * (1 - torch.eye(products.shape[-1], device=products.device))


def rounding_of_layers(samples: Sequence[Sample]) -> float | Tensor:
    """Return the rounding error of the force of several layers; a tensor [L, 1] for tokens gathered from all ranks."""
    gathered = [sample.rounding for sample in samples if isinstance(sample.rounding, Tensor)]
    return torch.stack(gathered).unsqueeze(1) if gathered else samples[0].rounding


def _precision(tokens: Tensor) -> AbstractContextManager[None]:
    """Use TF32 for half-precision tokens, which have only three digits; use full precision for other tokens."""
    return matmul_precision(tokens.device, tf32=tokens.dtype in (torch.float16, torch.bfloat16))
