r"""First-order importance of heads: the derivative of the loss by a factor on each head (Michel et al., 2019).

With the factor $\xi_h$ on head h, $|\partial L / \partial \xi_h| = |o_h^\top \partial L / \partial o_h|$: the output of
the head times its gradient. The value is the same before and after the output projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.diagnostics.hooks.attention_layers import AttentionLayer, find_attention_layers, replaced_head_outputs
from repulsive.diagnostics.hooks.calling import evaluating, token_masks
from repulsive.diagnostics.hooks.capture import check_hooks_ran
from repulsive.diagnostics.hooks.layer_masks import LayerMasks
from repulsive.errors import SelectionError
from repulsive.particles.gram import compute_dtype

Loss = Callable[[nn.Module, Any], Tensor]  # model, batch -> scalar


def first_order_importance(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    *,
    normalise: bool = True,
    layers: Sequence[AttentionLayer] | None = None,
) -> Tensor:
    r"""Compute first-order importance $I_h = E\,|o_h^\top \partial L / \partial o_h|$, a mean over tokens.

    Padding does not count if a batch is a mapping that contains its mask, such as `attention_mask`, or if the attention
    layers are called with a mask.

    Runs one forward and one backward pass per batch. Parameter gradients are not computed, and `.grad` does not change.

    Args:
        model: any module with heads that `find_heads` finds; it runs in evaluation mode.
        loss: called with the model and a batch; returns a scalar, for example a mean over items.
        batches: batches that are passed to `loss`, one at a time.
        normalise: divide by the l2 norm over each layer's heads, as in the paper, so that layers are comparable.
        layers: the result of `find_attention_layers`; None calls that function.

    Returns:
        float64 [L, M]; nan for missing heads of layers with fewer heads, zeros for a layer that did not run.

    Raises:
        SelectionError: there are no batches, or the loss is not a scalar.
        HeadLayoutError: no layer ran.
    """
    layers = find_attention_layers(model) if layers is None else layers
    rows = {layer.name: row for row, layer in enumerate(layers)}
    most_heads = max(layer.num_heads for layer in layers)
    total = torch.zeros(len(layers), most_heads, dtype=torch.float64, device="cpu")  # [L, M]
    tokens = torch.zeros(len(layers), 1, dtype=torch.float64, device="cpu")
    empty = True
    for batch in batches:
        empty = False
        for layer, product in _products(model, loss, batch, layers):
            row = rows[layer.name]
            total[row, : layer.num_heads] += product.sum(0)
            tokens[row] += len(product)
    if empty:
        raise SelectionError("first_order_importance: no batches; pass at least one")
    check_hooks_ran(layers, {layer.name for layer in layers if tokens[rows[layer.name]] > 0})
    importance = total / tokens.clamp(min=1)
    if normalise:
        importance = torch.nn.functional.normalize(importance, dim=-1, eps=1e-300)
    for row, layer in enumerate(layers):
        importance[row, layer.num_heads :] = torch.nan
    return importance


def _products(
    model: nn.Module, loss: Loss, batch: Any, layers: Sequence[AttentionLayer]
) -> list[tuple[AttentionLayer, Tensor]]:
    """Compute |o . dL/do| for every run of every layer, float64 [tokens, M], without padding."""
    outputs: list[tuple[AttentionLayer, Tensor]] = []
    of_layers, seen = LayerMasks(), []

    def keep(layer: AttentionLayer, heads: Tensor) -> Tensor:
        heads = heads if heads.requires_grad else heads.detach().requires_grad_()  # parameters may be frozen
        outputs.append((layer, heads))
        seen.append(of_layers.queries(layer, heads.shape))
        return heads

    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        evaluating(model),
        of_layers.recorded(layers),
        replaced_head_outputs(layers, keep),
    ):
        value = loss(model, batch)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise SelectionError("loss must return a tensor with one element, such as a mean over items")
        if outputs and not value.requires_grad:
            raise SelectionError("loss has no gradient: compute it from the model's result, without detach or no_grad")
        gradients = torch.autograd.grad(value, [heads for _, heads in outputs], allow_unused=True) if outputs else ()
    products = []
    real_queries, _ = token_masks(model, positional=False)  # the batch is for `loss`: it may be anything
    for (layer, heads), gradient, mask in zip(outputs, gradients, seen, strict=True):
        if gradient is not None:
            wide = compute_dtype(heads)
            product = (heads.detach().to(wide) * gradient.to(wide)).sum(-1).abs()  # [B, T, M]
            real = real_queries(batch, layer.where)
            real = mask if real is None or real.shape != product.shape[:2] else real
            if real is None:
                real = torch.ones(product.shape[:2], dtype=torch.bool, device="cpu")
            products.append((layer, product[real.to(product.device)].cpu().double()))
    return products
