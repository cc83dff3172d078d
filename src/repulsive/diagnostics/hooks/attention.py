r"""Record attention weights or logits while a model runs, whatever attention backend it uses.

The result of a softmax inside an attention layer is recorded as it is; its input holds the logits. For calls of scaled
dot-product attention, which returns neither, they are recomputed from its arguments: logits $s\, q k^\top + mask$, and
weights, their softmax. `nn.MultiheadAttention` and graph attention are made to return their weights
(`returned_weights`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from repulsive.diagnostics.hooks.attention_layers import AttentionLayer
from repulsive.diagnostics.hooks.returned_weights import Record, return_graph_weights, return_torch_weights
from repulsive.particles.gram import compute_dtype, full_precision

Read = Callable[[AttentionLayer, str, tuple[Any, ...], dict[str, Any], Tensor], Tensor | None]


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
                recorder.hook(stack, layer)
        stack.enter_context(recorder)
        yield


@contextmanager
def recorded_logits(layers: Sequence[AttentionLayer], record: Record, items: int) -> Iterator[None]:
    """Call `record(layer, logits)` with attention logits [B, M, T, S], minus infinity where masked, of some items.

    The pass itself does not change, so this works in training. `nn.MultiheadAttention`, graph attention and fused
    kernels outside torch record nothing.

    Args:
        layers: the layers to record.
        record: called each time one of the layers runs, without gradients and autocast.
        items: maximum number of items B, from the first on.
    """
    with ExitStack() as stack:
        recorder = _Recorder(record, partial(_read_logits, items))
        for layer in layers:
            if layer.kind in ("projection", "result"):
                recorder.hook(stack, layer)
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
    logits = dot_product_logits(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    weights = logits.softmax(-1).to(query.dtype)
    return weights.nan_to_num(0.0) if attn_mask is not None or is_causal else weights


def dot_product_logits(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Recompute the masked logits of scaled dot-product attention, [..., T, S]; minus infinity where masked."""
    wide = compute_dtype(query)
    query, key = query.to(wide), key.to(wide)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)  # [..., T, S]
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        is_boolean = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if is_boolean else scores + attn_mask
    return scores


def masked_logits(scores: Tensor) -> Tensor:
    """Replace the huge negative numbers that stand for masked pairs by minus infinity; compute in float32 or wider."""
    lowest = torch.finfo(scores.dtype).min / 2
    return scores.to(compute_dtype(scores)).masked_fill(scores < lowest, -math.inf)


class _Recorder(TorchFunctionMode):
    """Torch function mode that intercepts softmax and scaled dot-product attention inside the running layer."""

    def __init__(self, record: Record, read: Read | None = None) -> None:
        super().__init__()
        self._record, self._read = record, read or _read_weights
        self._running: list[AttentionLayer] = []

    def hook(self, stack: ExitStack, layer: AttentionLayer) -> None:
        """Register the hooks that mark a layer as running, until the stack closes."""

        def enter(_module: nn.Module, _args: object) -> None:
            self._running.append(layer)

        def leave(_module: nn.Module, _args: object, _result: object) -> None:
            self._running.pop()

        stack.callback(layer.attention.register_forward_pre_hook(enter).remove)
        stack.callback(layer.attention.register_forward_hook(leave).remove)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if self._running and name in ("softmax", "scaled_dot_product_attention"):
            layer = self._running[-1]
            values = self._read(layer, name, args, kwargs, result)
            if values is not None:
                self._record(layer, values)
        return result


def _read_weights(
    layer: AttentionLayer, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> Tensor | None:
    """Read attention weights [B, M, T, S] from a call of softmax or scaled dot-product attention."""
    if name == "softmax":
        weights = by_head(result.movedim(_softmax_dim(args, kwargs), -1), layer)
        return without_sink(weights, layer)
    return by_head(dot_product_weights(*args, **kwargs), layer)


@torch.no_grad()
def _read_logits(
    items: int, layer: AttentionLayer, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> Tensor | None:
    """Read attention logits [B, M, T, S] of the first items from a call of softmax or scaled dot-product attention."""
    with full_precision(result.device):
        if name == "softmax":
            scores = args[0] if args else kwargs["input"]
            logits = by_head(scores.detach().movedim(_softmax_dim(args, kwargs), -1), layer)
            logits = without_sink(logits, layer)
            return None if logits is None else masked_logits(logits[:items])
        call = _DOT_PRODUCT.bind(*args, **kwargs)
        tensors = {name: value for name, value in call.arguments.items() if isinstance(value, Tensor)}
        count = len(tensors["query"])
        for part, value in tensors.items():
            has_items = value.ndim == 4 == tensors["query"].ndim and len(value) == count
            call.arguments[part] = (value[:items] if has_items else value).detach()
        logits = by_head(dot_product_logits(*call.args, **call.kwargs), layer)
        return None if logits is None else masked_logits(logits[:items])


def _softmax_dim(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
    return -1 if dim is None else int(dim)


def without_sink(values: Tensor | None, layer: AttentionLayer) -> Tensor | None:
    """Remove the column of a learned attention sink, which is not a token."""
    has_sink = isinstance(getattr(layer.attention, "sinks", None), Tensor)
    return values[..., :-1] if values is not None and has_sink else values


_DOT_PRODUCT = inspect.signature(dot_product_logits)


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
