r"""What a model would say with its heads weighed anew, all weightings in one pass.

Attention is $\sum_h \xi_h W^O_h o_h$ with every $\xi_h = 1$ (Michel et al., 2019). Where heads feed the readout and
nothing else, as in additive attention, what precedes them is the same for any $\xi$: it is computed once, and the
batch is repeated behind the heads, one copy for each weighting.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from repulsive.diagnostics.hooks.calling import call, evaluating
from repulsive.diagnostics.hooks.capture import refuse_silence
from repulsive.diagnostics.hooks.outlets import Outlet, find_outlets, rerouted
from repulsive.errors import HeadLayoutError


@torch.no_grad()
def reweighted_logits(
    model: nn.Module, inputs: object, weights: Tensor, *, outlets: Sequence[Outlet] | None = None
) -> Tensor:
    r"""Logits under each weighting $\xi_k$ of the heads, [K, B, C], with one pass through the encoder.

    Args:
        model: a classifier whose heads leave an additive attention and are read by nothing else; it stays as it is.
        inputs: a tensor, a tuple of arguments or a mapping, as the model takes them.
        weights: $\xi$ [K, M]; `leave_one_out(M)` takes each head away alone.
        outlets: what `find_outlets` returned; None: found here.

    Raises:
        HeadLayoutError: the model has other attention than one additive layer of M heads.
    """
    outlets = find_outlets(model) if outlets is None else outlets
    if [(outlet.kind, outlet.num_heads) for outlet in outlets] != [("result", weights.shape[1])]:
        found = ", ".join(f"{outlet.name} ({outlet.num_heads} heads)" for outlet in outlets)
        raise HeadLayoutError(
            f"weights {list(weights.shape)} need one additive attention of {weights.shape[1]} heads; the model has "
            f"{found}: use repulsive.diagnostics.redundancy.head_ablation, a pass for each head"
        )
    heard: set[str] = set()

    def weigh(outlet: Outlet, heads: Tensor) -> Tensor:
        heard.add(outlet.name)
        scaled = weights.to(heads).view(len(weights), 1, 1, -1, 1) * heads  # [K, B, 1, M, d]
        return scaled.flatten(0, 1)  # [K B, 1, M, d]

    with evaluating(model), rerouted(outlets, weigh):
        logits = call(model, inputs)  # [K B, C]
    refuse_silence(outlets, heard)
    return torch.as_tensor(logits).unflatten(0, (len(weights), -1))


def only_one(heads: int) -> Tensor:
    """Weightings that leave each head alone, float64 [M, M]."""
    return torch.eye(heads, dtype=torch.float64)


def fewer_and_fewer(order: Sequence[int]) -> Tensor:
    """Weightings without the first 0, 1, ..., M heads of an order, float64 [M + 1, M].

    Example:
        >>> fewer_and_fewer([1, 0]).tolist()
        [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]
    """
    found = torch.ones(len(order) + 1, len(order), dtype=torch.float64)
    for gone, head in enumerate(order):
        found[gone + 1 :, head] = 0
    return found


def leave_one_out(heads: int) -> Tensor:
    """Weightings that take each head away alone, float64 [M, M].

    Example:
        >>> leave_one_out(2).tolist()
        [[0.0, 1.0], [1.0, 0.0]]
    """
    return 1 - torch.eye(heads, dtype=torch.float64)
