r"""Data of the head atlas: one entry per attention layer, and small pictures of attention against uniform.

A picture shows $\log_2(n_t A_{ts})$ for a query t that sees $n_t$ keys: 0 for uniform attention, so that a head without
preference looks flat for texts of any length, with and without a causal mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from repulsive.diagnostics.inspection import Inspection
from repulsive.diagnostics.verdict import redundant_heads, similar_heads

RANGE = 4.0  # colours cover 2^-4 to 2^4 times uniform attention
UNIFORM = 128  # byte of uniform attention; 1 to 255 cover the range, 0 is a key that the query does not see
_STEP = (255 - UNIFORM) / RANGE


@dataclass(frozen=True, eq=False)
class AtlasLayer:
    """One row of the atlas.

    Args:
        label: short name of the layer.
        heads: number of heads M.
        weights: attention on the first example [M, T, S]; None if it was not captured.
        similarity: cosine of the attention logits of each pair of heads [M, M]; None if not measured.
        importance: first-order importance per head, or empty.
        ablation: change of the output per ablated head, or empty.
        kinds: kind per head, "" if none; empty if not measured.
        scores: name of a kind -> score per head.
        redundant: redundant heads.
        similar: head -> the most similar other head, if they are more alike than chance.
    """

    label: str
    heads: int
    weights: Tensor | None = None
    similarity: Tensor | None = None
    importance: Sequence[float] = ()
    ablation: Sequence[float] = ()
    kinds: Sequence[str] = ()
    scores: dict[str, Sequence[float]] | None = None
    redundant: Sequence[int] = ()
    similar: dict[int, int] | None = None


def atlas_layers(inspection: Inspection) -> list[AtlasLayer]:
    """Collect what the atlas shows, layer by layer; empty without inputs."""
    if not inspection.items:
        return []
    maps = inspection.maps[0] if inspection.maps else {}
    logits = {each.similarity.name: each.similarity.cosine for each in inspection.circuits.logits}
    redundant, similar, kinds = redundant_heads(inspection), similar_heads(inspection), inspection.kinds
    change = None if inspection.ablation is None else inspection.ablation.change
    layers = []
    for row, (name, _, _, count) in enumerate(inspection.layers):
        layers.append(
            AtlasLayer(
                inspection.label(name),
                count,
                maps.get(name),
                logits.get(name),
                [] if inspection.importance is None else inspection.importance[row, :count].tolist(),
                [] if change is None else change[row, :count].tolist(),
                [] if kinds is None else [kinds.label(row, head) for head in range(count)],
                None if kinds is None else {kind: x[row, :count].tolist() for kind, x in kinds.scores.items()},
                [head for at, head in redundant if at == row],
                {head: other for (at, head), (other, _) in similar.items() if at == row},
            )
        )
    return layers


def against_uniform(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply attention by the number of keys that each query sees: 1 is uniform attention.

    A key is visible to a query if any head of the layer gives it weight: softmax gives masked keys exactly zero.

    Args:
        weights: attention of one layer [M, T, S].

    Returns:
        The ratio [M, T, S], and the visible keys, bool [T, S].

    Example:
        >>> ratio, visible = against_uniform(torch.tensor([[[1.0, 0.0], [0.25, 0.75]]]))
        >>> ratio.tolist(), visible.tolist()
        ([[[1.0, 0.0], [0.5, 1.5]]], [[True, False], [True, True]])
    """
    visible = (weights > 0).any(0)  # [T, S]
    return weights.double() * visible.sum(-1, keepdim=True), visible


def pictures(weights: Tensor, size: int) -> Tensor:
    """Draw each head of a layer as bytes, on a logarithmic scale around uniform attention.

    Args:
        weights: attention of one layer [M, T, S].
        size: largest number of rows and columns; larger maps are averaged in blocks over visible keys.

    Returns:
        uint8 [M, min(T, size), min(S, size)]: 128 is uniform, 255 is 16 times as much or more, 1 is a sixteenth or
        less, 0 is not visible.
    """
    ratio, visible = against_uniform(weights.cpu())
    shape = (min(weights.shape[1], size), min(weights.shape[2], size))
    share = adaptive_avg_pool2d(visible.double()[None], shape)  # [1, t, s]
    mean = adaptive_avg_pool2d(ratio * visible, shape) / share.clamp(min=1e-12)  # [M, t, s]
    return ratio_bytes(mean).where(share > 0, torch.zeros((), dtype=torch.uint8))


def ratio_bytes(ratio: Tensor) -> Tensor:
    """Encode attention relative to uniform attention as bytes from 1 to 255, on the scale of `pictures`."""
    steps = ratio.clamp(min=2.0**-RANGE, max=2.0**RANGE).log2() * _STEP + UNIFORM
    return steps.round().clamp(1, 255).to(torch.uint8)
