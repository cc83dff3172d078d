r"""How much the loss leans on each head, to first order (Michel et al., 2019, section 4.1).

With $\xi_h$ the factor on head h, $|\partial L / \partial \xi_h| = |o_h^\top \partial L / \partial o_h|$: what leaves
the head times its gradient. The same number comes out before and behind the output projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.diagnostics.hooks.calling import evaluating
from repulsive.diagnostics.hooks.capture import refuse_silence
from repulsive.diagnostics.hooks.outlets import Outlet, find_outlets, rerouted
from repulsive.errors import SelectionError
from repulsive.particles.gram import compute_dtype


def first_order_importance(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any],
    *,
    normalise: bool = True,
    outlets: Sequence[Outlet] | None = None,
) -> Tensor:
    r"""$I_h = E\,|o_h^\top \partial L / \partial o_h|$, the absolute value per token, the mean over tokens.

    One forward and one backward pass per batch; the gradients of the weights are not computed and `.grad` is not
    touched.

    Args:
        model: any module with heads that `find_heads` finds; it runs in evaluation mode.
        loss: called with the model and a batch; a scalar. A mean over items makes batches of equal size comparable.
        batches: what `loss` is given, one after the other.
        normalise: divide by the l2 norm over each layer's heads, as the source does, so that layers compare.
        outlets: what `find_outlets` returned; None: found here.

    Returns:
        float64 [L, M]; nan where a layer has fewer heads, zeros for a layer that no batch reached.

    Raises:
        SelectionError: there are no batches.
        HeadLayoutError: no head was reached.
    """
    outlets = find_outlets(model) if outlets is None else outlets
    places = {outlet.name: layer for layer, outlet in enumerate(outlets)}
    most = max(outlet.num_heads for outlet in outlets)
    total = torch.zeros(len(outlets), most, dtype=torch.float64)  # [L, M]
    tokens = torch.zeros(len(outlets), 1, dtype=torch.float64)
    empty = True
    for batch in batches:
        empty = False
        left = _leaving(model, loss, batch, outlets)
        for outlet, product in left:
            layer = places[outlet.name]
            total[layer, : outlet.num_heads] += product.sum(0)
            tokens[layer] += len(product)
    if empty:
        raise SelectionError("first_order_importance: no batches; give it at least one")
    refuse_silence(outlets, {outlet.name for outlet in outlets if tokens[places[outlet.name]] > 0})
    found = total / tokens.clamp(min=1)
    if normalise:
        found = torch.nn.functional.normalize(found, dim=-1, eps=1e-300)
    for layer, outlet in enumerate(outlets):
        found[layer, outlet.num_heads :] = torch.nan
    return found


def _leaving(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Any, outlets: Sequence[Outlet]
) -> list[tuple[Outlet, Tensor]]:
    """For each run of each layer |o . dL/do| of every token, float64 [tokens, M]."""
    seen: list[tuple[Outlet, Tensor]] = []

    def keep(outlet: Outlet, heads: Tensor) -> Tensor:
        own = heads if heads.requires_grad else heads.detach().requires_grad_()  # frozen models have gradients too
        seen.append((outlet, own))
        return own

    with torch.inference_mode(False), torch.enable_grad(), evaluating(model), rerouted(outlets, keep):
        value = loss(model, batch)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise SelectionError("loss must return a tensor with one number, such as a mean over items")
        gradients = torch.autograd.grad(value, [heads for _, heads in seen], allow_unused=True) if seen else ()
    found = []
    for (outlet, heads), gradient in zip(seen, gradients, strict=True):
        if gradient is not None:
            wide = compute_dtype(heads)
            product = (heads.detach().to(wide) * gradient.to(wide)).sum(-1).abs()  # [B, T, M]
            found.append((outlet, product.flatten(0, 1).cpu().double()))
    return found
