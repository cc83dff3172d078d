r"""Record attention weights while a model runs, whatever attention backend it uses.

The result of a softmax inside an attention layer is recorded as it is. For calls of scaled dot-product attention,
which does not return its weights, they are recomputed from its arguments, $\mathrm{softmax}(s\, q k^\top + mask)$.
`nn.MultiheadAttention` and graph attention are made to return their weights (`returned_weights`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from repulsive.diagnostics.hooks.attention_layers import AttentionLayer
from repulsive.diagnostics.hooks.returned_weights import Record, return_graph_weights, return_torch_weights
from repulsive.particles.gram import compute_dtype


@contextmanager
def recorded_attention(layers: Sequence[AttentionLayer], record: Record) -> Iterator[None]:
    """Call `record(layer, weights)` with attention weights [B, M, T, S] each time one of the layers runs."""
    with ExitStack() as stack:
        recorder = _Recorder(record)
        for layer in layers:
            if layer.kind == "torch":
                return_torch_weights(stack, layer, record)
            elif layer.kind == "graph":
                return_graph_weights(stack, layer, record)
            else:
                enter, leave = recorder.hooks(layer)
                stack.callback(layer.attention.register_forward_pre_hook(enter).remove)
                stack.callback(layer.attention.register_forward_hook(leave).remove)
        stack.enter_context(recorder)
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
    """Recompute the weights of `torch.nn.functional.scaled_dot_product_attention`, without dropout, [..., T, S].

    A query whose keys are all masked has zero weights. Half precision is computed in float32, as in torch's kernels:
    a score of 20 in bfloat16 has an error of up to 0.06, and so has the logarithm of its weight.
    """
    given, wide = query.dtype, compute_dtype(query)
    query, key = query.to(wide), key.to(wide)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)  # [..., T, S]
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        is_boolean = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if is_boolean else scores + attn_mask
    weights = scores.softmax(-1).to(given)
    return weights.nan_to_num(0.0) if attn_mask is not None else weights


class _Recorder(TorchFunctionMode):
    """Torch function mode that intercepts softmax and scaled dot-product attention inside the running layer."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record
        self._running: list[AttentionLayer] = []

    def hooks(self, layer: AttentionLayer) -> tuple[Callable[..., None], Callable[..., None]]:
        """Make the forward pre-hook and the forward hook that mark a layer as running."""

        def enter(_module: nn.Module, _args: object) -> None:
            self._running.append(layer)

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
        layer = self._running[-1]
        if name == "softmax":
            dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            weights = by_head(result.movedim(-1 if dim is None else dim, -1), layer)
        else:
            weights = by_head(dot_product_weights(*args, **kwargs), layer)
        if weights is not None:
            has_sink = name == "softmax" and isinstance(getattr(layer.attention, "sinks", None), Tensor)
            self._record(layer, weights[..., :-1] if has_sink else weights)  # the sink column is not a token
        return result


def by_head(weights: Tensor, layer: AttentionLayer) -> Tensor | None:
    """Reshape attention weights to [B, M, T, S]; None if no axis has the length of this layer's heads."""
    heads = layer.num_heads
    if layer.kind == "result":
        return weights.unsqueeze(2) if weights.ndim == 3 and weights.shape[1] == heads else None  # [B, M, 1, T]
    if weights.ndim == 4 and weights.shape[1] == heads:
        return weights
    if weights.ndim == 3 and weights.shape[0] % heads == 0:
        return weights.unflatten(0, (-1, heads))  # [B M, T, S]
    return None
