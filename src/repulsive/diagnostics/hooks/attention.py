r"""See attention weights while a model runs, whether it hands them out or not.

A softmax inside an attention layer is taken as it is. Where the layer calls scaled dot-product attention, which keeps
its weights to itself, they are computed again from what the call was given, $\mathrm{softmax}(s\, q k^\top + mask)$.
`nn.MultiheadAttention` and attention over graphs are asked for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from repulsive.diagnostics.hooks.layer_weights import Seen, ask_graph, ask_torch
from repulsive.diagnostics.hooks.outlets import Outlet
from repulsive.particles.gram import compute_dtype


@contextmanager
def watched(outlets: Sequence[Outlet], seen: Seen) -> Iterator[None]:
    """Call `seen(outlet, weights)` with attention weights [B, M, T, S] each time one of these layers attends."""
    with ExitStack() as stack:
        watch = _Watch(seen)
        for outlet in outlets:
            if outlet.kind == "torch":
                ask_torch(stack, outlet, seen)
            elif outlet.kind == "graph":
                ask_graph(stack, outlet, seen)
            else:
                enter, leave = watch.of(outlet)
                stack.callback(outlet.attention.register_forward_pre_hook(enter).remove)
                stack.callback(outlet.attention.register_forward_hook(leave).remove)
        stack.enter_context(watch)
        yield


def dot_product_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The weights inside `torch.nn.functional.scaled_dot_product_attention`, without dropout, [..., T, S].

    A query that may look at nothing has weights of zero. Half precision is widened on the way, as in torch's kernels:
    a score of 20 in bfloat16 is off by up to 0.06, and so is the logarithm of its weight.
    """
    given, wide = query.dtype, compute_dtype(query)
    query, key = query.to(wide), key.to(wide)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)  # [..., T, S]
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        barred = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if barred else scores + attn_mask
    weights = scores.softmax(-1).to(given)
    return weights.nan_to_num(0.0) if attn_mask is not None else weights


class _Watch(TorchFunctionMode):
    """Sees softmax and scaled dot-product attention, and knows which layer is running."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen
        self._running: list[Outlet] = []

    def of(self, outlet: Outlet) -> tuple[Callable[..., None], Callable[..., None]]:
        """Hooks for the start and the end of a layer."""

        def enter(_module: nn.Module, _args: object) -> None:
            self._running.append(outlet)

        def leave(_module: nn.Module, _args: object, _result: object) -> None:
            self._running.pop()

        return enter, leave

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if not self._running or name not in ("softmax", "scaled_dot_product_attention"):
            return result
        outlet = self._running[-1]
        if name == "softmax":
            dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            weights = by_head(result.movedim(-1 if dim is None else dim, -1), outlet)
        else:
            weights = by_head(dot_product_weights(*args, **kwargs), outlet)
        if weights is not None:
            sinks = name == "softmax" and isinstance(getattr(outlet.attention, "sinks", None), Tensor)
            self._seen(outlet, weights[..., :-1] if sinks else weights)  # a sink is a last column that is no token
        return result


def by_head(weights: Tensor, outlet: Outlet) -> Tensor | None:
    """Weights as [B, M, T, S], or None if no axis of theirs counts this layer's heads."""
    heads = outlet.num_heads
    if outlet.kind == "result":
        return weights.unsqueeze(2) if weights.ndim == 3 and weights.shape[1] == heads else None  # [B, M, 1, T]
    if weights.ndim == 4 and weights.shape[1] == heads:
        return weights
    if weights.ndim == 3 and weights.shape[0] % heads == 0:
        return weights.unflatten(0, (-1, heads))  # [B M, T, S]
    return None
