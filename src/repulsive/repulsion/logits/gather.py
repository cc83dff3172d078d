"""Gather the sampled tokens of all ranks, so that every rank computes the same force."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from repulsive.repulsion.logits.norms import NormFormula, formula_of
from repulsive.repulsion.logits.projections import CircuitLayer, Projection
from repulsive.repulsion.logits.samples import Sample


def world_size() -> int:
    """Return the number of ranks; 1 without torch.distributed."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def gather_samples(
    layers: Sequence[CircuitLayer], samples: Mapping[tuple[int, str], Sample], tokens: int
) -> dict[tuple[int, str], Sample]:
    """Concatenate the samples of all ranks. Every rank must call this, even if it has no tokens.

    Args:
        layers: the layers, equal on every rank.
        samples: samples of this rank.
        tokens: number of rows that every rank sends, at least as many as it sampled.

    Returns:
        The same samples on every rank: ranks x `tokens` rows for each projection; missing rows have weight 0.
    """
    world = world_size()
    joined: dict[tuple[int, str], Sample] = {}
    for number, layer in enumerate(layers):
        for part, projection in layer.watched.items():
            own = samples.get((number, part))
            columns = _columns(projection)
            device = projection.targets[0].slice.parameter().device
            sent = torch.zeros(tokens, sum(columns) + 3, device=device, dtype=_dtype(projection))
            if own is not None:
                count = own.weights.shape[0]
                parts = [*own.inputs, own.outputs.flatten(1), own.weights[:, None], own.sequences[:, None]]
                sent[:count, :-1] = torch.cat([p.to(sent.dtype) for p in parts], dim=1)
                sent[:, -1] = own.rounding
            received = sent.new_empty(world * tokens, sent.shape[1])
            _all_gather(received, sent)
            *inputs, outputs, weights, sequences, rounding = received.split([*columns, 1, 1, 1], dim=1)
            joined[number, part] = Sample(
                tuple(inputs),
                outputs.unflatten(1, (projection.group.num_heads, projection.width)),
                weights[:, 0],
                sequences[:, 0].long(),
                tokens,  # no rank has more sequences
                rounding.amax(),  # a rank without tokens sends 0
                _norm(projection, own),
                projection.clip,
                ranks=world,
            )
    return joined


def _all_gather(received: Tensor, sent: Tensor) -> None:
    """Concatenate a tensor of every rank; newer versions of torch have another name for this function."""
    distributed = torch.distributed
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    gather(received, sent)


def _norm(projection: Projection, own: Sample | None) -> NormFormula | None:
    """Return the norm of q or k, equal on all ranks; a rank without tokens derives it from random tokens."""
    if own is not None or projection.norm is None:
        return None if own is None else own.norm
    parameter = projection.targets[0].slice.parameter()
    shape = (8, projection.group.num_heads, projection.width)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(parameter)
    return formula_of(projection.norm, tokens, projection.group.name)


def _columns(projection: Projection) -> list[int]:
    """List the widths of the column blocks that are sent: the inputs, then the projected token."""
    weights = [target.slice for target in projection.targets if not target.is_bias]
    return [*(part.inputs for part in weights), projection.group.num_heads * projection.width]


def _dtype(projection: Projection) -> torch.dtype:
    parameter = projection.targets[0].slice.parameter()
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32
