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
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from repulsive.diagnostics.hooks.attention_layers import AttentionLayer
from repulsive.diagnostics.hooks.returned_weights import Record, return_graph_weights, return_torch_weights
from repulsive.particles.gram import compute_dtype, full_precision

# Called with the running layer, the name of the torch function, its arguments and its result.
OnCall = Callable[[AttentionLayer, str, tuple[Any, ...], dict[str, Any], Tensor], None]
# Called with logits [B, M, T, S] and the indices of their queries, [T]; None for all.
RecordLogits = Callable[[AttentionLayer, Tensor, Tensor | None], None]
Guard = Callable[[AttentionLayer], AbstractContextManager[None]]
MAX_LOGITS = 1 << 24  # logits computed at once: 64 MB in float32


def _no_guard(_layer: AttentionLayer) -> AbstractContextManager[None]:
    return nullcontext()


@contextmanager
def recorded_attention(layers: Sequence[AttentionLayer], record: Record) -> Iterator[None]:
    """Call `record(layer, weights)` with attention weights [B, M, T, S] each time one of the layers runs."""
    with ExitStack() as stack:
        recorder = _Recorder(partial(_record_weights, record))
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
def recorded_logits(
    layers: Sequence[AttentionLayer], record: RecordLogits, items: int, guard: Guard = _no_guard
) -> Iterator[None]:
    """Call `record(layer, logits, queries)` with attention logits [B, M, T, S], minus infinity where masked.

    The pass itself does not change, so this works in training. `nn.MultiheadAttention`, graph attention and fused
    kernels outside torch record nothing. For long sequences there are fewer items, and then fewer queries, so that
    memory stays bounded.

    Args:
        layers: the layers to record.
        record: called each time one of the layers runs, without gradients and autocast.
        items: maximum number of items B, from the first on.
        guard: makes the context in which a layer is measured; it may handle errors, which would stop the pass.
    """
    with ExitStack() as stack:
        recorder = _Recorder(partial(_record_logits, record, items, guard))
        for layer in layers:
            if layer.kind in ("projection", "parameter", "result"):
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

    def __init__(self, on_call: OnCall) -> None:
        super().__init__()
        self._on_call = on_call
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
            self._on_call(self._running[-1], name, args, kwargs, result)
        return result


def _record_weights(
    record: Record, layer: AttentionLayer, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    """Record attention weights [B, M, T, S] of a call of softmax or scaled dot-product attention."""
    if name == "softmax":
        weights = without_sink(by_head(result.movedim(_softmax_dim(args, kwargs), -1), layer), layer)
    else:
        weights = by_head(dot_product_weights(*args, **kwargs), layer)
    if weights is not None:
        record(layer, weights)


@torch.no_grad()
def _record_logits(
    record: RecordLogits,
    items: int,
    guard: Guard,
    layer: AttentionLayer,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Tensor,
) -> None:
    """Record attention logits [B, M, T, S] of the first items of a call of softmax or scaled dot-product attention."""
    with guard(layer), full_precision(result.device):
        if name == "softmax":
            scores = args[0] if args else kwargs["input"]
            logits = without_sink(by_head(scores.detach().movedim(_softmax_dim(args, kwargs), -1), layer), layer)
            if logits is not None:
                items, queries = bounded(items, *logits.shape[1:], device=logits.device)
                logits = logits[:items] if queries is None else logits[:items, :, queries]
        else:
            call = _DOT_PRODUCT.bind(*args, **kwargs)
            call.apply_defaults()
            logits, queries = _some_dot_products(call.arguments, layer, items)
        if logits is not None:
            record(layer, masked_logits(logits), queries)


def _some_dot_products(
    arguments: dict[str, Any], layer: AttentionLayer, items: int
) -> tuple[Tensor | None, Tensor | None]:
    """Compute logits [B, M, T, S] of some items and queries, from the arguments of scaled dot-product attention."""
    query, key, mask = arguments["query"].detach(), arguments["key"].detach(), arguments["attn_mask"]
    length, keys = query.shape[-2], key.shape[-2]
    heads = query.shape[-3] if query.ndim == 4 else layer.num_heads  # 3 dimensions: [B M, T, d]
    items, queries = bounded(items, heads, length, keys, device=query.device)
    if mask is None and arguments["is_causal"]:
        mask = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril()
    count = len(query) if query.ndim == 4 else 0
    if count:
        query, key = query[:items], key[:items]
        mask = mask[:items] if mask is not None and mask.ndim == 4 and len(mask) == count else mask
    else:
        query, key = query[: items * heads], key[: items * heads]
        mask = mask[: items * heads] if mask is not None and mask.ndim == 3 and len(mask) > 1 else mask
    if queries is not None:
        query = query[..., queries, :]
        mask = mask[..., queries, :] if mask is not None and mask.shape[-2] == length else mask
    scores = dot_product_logits(
        query, key, attn_mask=mask, scale=arguments["scale"], enable_gqa=arguments["enable_gqa"]
    )
    return by_head(scores, layer), queries


def bounded(items: int, heads: int, queries: int, keys: int, *, device: torch.device) -> tuple[int, Tensor | None]:
    """Limit how many logits are computed at once.

    Returns:
        The number of items, and the indices of evenly spaced queries, int64; None for all.
    """
    items = max(1, min(items, MAX_LOGITS // max(1, heads * queries * keys)))
    if heads * queries * keys <= MAX_LOGITS:
        return items, None
    count = max(1, MAX_LOGITS // (heads * keys))
    return items, torch.linspace(0, queries - 1, count, dtype=torch.float32, device=device).round().long()


def _softmax_dim(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
    return -1 if dim is None else int(dim)


def without_sink(values: Tensor | None, layer: AttentionLayer) -> Tensor | None:
    """Remove the column of a learned attention sink, which is not a token.

    Granite has a sink without a column: it scales the result of attention, which has as many keys as queries.
    """
    if values is None or not isinstance(getattr(layer.attention, "sinks", None), Tensor):
        return values
    return values[..., :-1] if values.shape[-1] > values.shape[-2] else values


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
