r"""Logits of a classifier under many weightings of its heads, in one forward pass.

Attention is $\sum_h \xi_h W^O_h o_h$ with every $\xi_h = 1$ (Michel et al., 2019). If heads feed only the readout, as
in additive attention, everything before them is independent of $\xi$. It is computed once, and the batch is repeated
after the heads, with one copy per weighting.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from repulsive.diagnostics.hooks.attention_layers import AttentionLayer, find_attention_layers, replaced_head_outputs
from repulsive.diagnostics.hooks.calling import call, evaluating
from repulsive.diagnostics.hooks.capture import check_hooks_ran
from repulsive.errors import HeadLayoutError


@torch.no_grad()
def reweighted_logits(
    model: nn.Module, inputs: object, weights: Tensor, *, layers: Sequence[AttentionLayer] | None = None
) -> Tensor:
    r"""Compute logits under each weighting $\xi_k$ of the heads, [K, B, C], with one pass through the encoder.

    Args:
        model: a classifier with one additive attention whose heads feed only the readout; it does not change.
        inputs: a tensor, a tuple of arguments or a mapping, as the model takes them.
        weights: $\xi$ [K, M]; `leave_one_out(M)` removes each head in turn.
        layers: the result of `find_attention_layers`; None calls that function.

    Raises:
        HeadLayoutError: the model does not have exactly one additive attention of M heads.
    """
    layers = find_attention_layers(model) if layers is None else layers
    if [(layer.kind, layer.num_heads) for layer in layers] != [("result", weights.shape[1])]:
        listed = ", ".join(f"{layer.name} ({layer.num_heads} heads)" for layer in layers)
        raise HeadLayoutError(
            f"weights {list(weights.shape)} need one additive attention of {weights.shape[1]} heads; the model has "
            f"{listed}: use repulsive.diagnostics.redundancy.head_ablation, which runs one pass per head"
        )
    ran: set[str] = set()

    def reweight(layer: AttentionLayer, heads: Tensor) -> Tensor:
        ran.add(layer.name)
        scaled = weights.to(heads).view(len(weights), 1, 1, -1, 1) * heads  # [K, B, 1, M, d]
        return scaled.flatten(0, 1)  # [K B, 1, M, d]

    with evaluating(model), replaced_head_outputs(layers, reweight):
        logits = call(model, inputs)  # [K B, C]
    check_hooks_ran(layers, ran)
    return torch.as_tensor(logits).unflatten(0, (len(weights), -1))


def keep_one(heads: int) -> Tensor:
    """Make M weightings that each keep a single head, float64 [M, M]."""
    return torch.eye(heads, dtype=torch.float64, device="cpu")


def leave_one_out(heads: int) -> Tensor:
    """Make M weightings that each remove a single head, float64 [M, M].

    Example:
        >>> leave_one_out(2).tolist()
        [[0.0, 1.0], [1.0, 0.0]]
    """
    return 1 - torch.eye(heads, dtype=torch.float64, device="cpu")


def remove_in_order(order: Sequence[int]) -> Tensor:
    """Make weightings that remove the first 0, 1, ..., M heads of an order, float64 [M + 1, M].

    Example:
        >>> remove_in_order([1, 0]).tolist()
        [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]
    """
    weights = torch.ones(len(order) + 1, len(order), dtype=torch.float64, device="cpu")
    for position, head in enumerate(order):
        weights[position + 1 :, head] = 0
    return weights
