"""Record queries, keys and values of `nn.MultiheadAttention`, which has no projection modules to hook."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repulsive.diagnostics.hooks.attention import bounded, dot_product_logits, masked_logits
from repulsive.diagnostics.hooks.qkv_layers import Projection, QKVLayer
from repulsive.particles.gram import compute_dtype, full_precision

Keep = Callable[[str, Tensor, Tensor | None], None]  # part, heads [S, n, M, d], mask without padding [S, n]
# Called with logits [B, M, T, S], head outputs [B, T, M, d], and the indices of the queries, [T]; None for all.
RecordAll = Callable[[Tensor, Tensor, Tensor | None], None]
_SIGNATURE = inspect.signature(nn.MultiheadAttention.forward)
_INPUTS = {"q": "query", "k": "key", "v": "value"}


def hook_torch(
    stack: ExitStack, part: str, projection: Projection, real: Callable[[str, Tensor], Tensor | None], keep: Keep
) -> None:
    """Hook the attention module to compute q, k or v of every call, without keys that the call masks as padding.

    Args:
        stack: exit stack that removes the hook when it closes.
        part: "q", "k" or "v".
        projection: the projection of that part; its module is the attention.
        real: called with a part and its heads [S, n, M, d]; returns which tokens count, bool [S, n], or None for all.
        keep: called with the part, the heads and the mask.
    """

    @torch.no_grad()
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = _SIGNATURE.bind(module, *args, **kwargs).arguments
        heads = _project_batch(module, part, projection, arguments)  # [S, n, M, d]
        masks = [real(part, heads)]
        if part != "q" or arguments["query"] is arguments["key"]:
            masks.append(_without_padding(arguments.get("key_padding_mask")))
        keep(part, heads, _intersect(masks, heads))

    stack.callback(projection.module.register_forward_pre_hook(before, with_kwargs=True).remove)


def hook_torch_logits(
    stack: ExitStack,
    layer: QKVLayer,
    record: RecordAll,
    items: int,
    guard: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Hook `nn.MultiheadAttention` to recompute its logits and head outputs, without changing its own computation.

    Attention dropout is left out.

    Args:
        stack: exit stack that removes the hook when it closes.
        layer: a layer with the parts q, k and v.
        record: called with logits [B, M, T, S], minus infinity where masked, head outputs [B, T, M, d], and the indices
            of these queries; long sequences are sampled, as in `recorded_logits`.
        items: maximum number of items B, from the first on.
        guard: makes the context in which the layer is measured; it may handle errors, which would stop the pass.
    """
    attention = layer.parts["q"].module
    if attention.bias_k is not None or attention.add_zero_attn:
        return  # keys that are not tokens

    @torch.no_grad()
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = _SIGNATURE.bind(module, *args, **kwargs).arguments
        # Autocast rounds queries and keys as in the layer itself; logits are computed from them without it.
        heads = {p: _project_batch(module, p, layer.parts[p], arguments)[:items] for p in "qkv"}  # [B, n, M, d]
        q, k, v = (heads[p].transpose(1, 2) for p in "qkv")  # [B, M, n, d]
        with full_precision(q.device):
            count, queries = bounded(items, q.shape[1], q.shape[2], k.shape[2], device=q.device)
            q, k, v, mask = q[:count], k[:count], v[:count], _additive(arguments, q[:count])
            if queries is not None:
                q, mask = q[:, :, queries], mask[..., queries, :] if mask.ndim and mask.shape[-2] > 1 else mask
            logits = masked_logits(dot_product_logits(q, k) + mask)  # [B, M, T, S]
            record(logits, (logits.softmax(-1).nan_to_num() @ v.to(logits)).transpose(1, 2), queries)

    def guarded(*call: Any) -> None:
        with guard():
            before(*call)

    stack.callback(attention.register_forward_pre_hook(guarded, with_kwargs=True).remove)


def _additive(arguments: Mapping[str, Any], q: Tensor) -> Tensor:
    """Merge the masks of a call into numbers to add to logits [B, M, T, S]; boolean masks are True if masked."""
    total = torch.zeros((), device=q.device, dtype=compute_dtype(q))
    attention_mask, padding = arguments.get("attn_mask"), arguments.get("key_padding_mask")
    if attention_mask is not None:
        if attention_mask.ndim == 3:  # [B M, T, S]
            attention_mask = attention_mask.unflatten(0, (-1, q.shape[1]))[: len(q)]
        total = total + _as_numbers(attention_mask, total.dtype)
    if padding is not None:
        total = total + _as_numbers(torch.atleast_2d(padding)[: len(q), None, None], total.dtype)
    return total


def _as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)


def _project_batch(module: nn.Module, part: str, projection: Projection, arguments: Mapping[str, Any]) -> Tensor:
    """Project the tokens of a call to the heads of one part, [S, n, M, d]."""
    heads = _project(module, part, projection, arguments[_INPUTS[part]])  # [S, n, M, d], [n, S, M, d] or [n, M, d]
    if heads.ndim == 3:
        return heads.unsqueeze(0)
    return heads if module.batch_first else heads.transpose(0, 1)


def _without_padding(padding: Tensor | None) -> Tensor | None:
    """Invert a padding mask, in which padding is True or minus infinity."""
    return None if padding is None else torch.atleast_2d(padding == 0)


def _intersect(masks: Sequence[Tensor | None], heads: Tensor) -> Tensor | None:
    """Intersect the masks that have the shape of the tokens, bool [S, n]; None if no mask has that shape."""
    fitting = [mask.to(heads.device) for mask in masks if mask is not None and mask.shape == heads.shape[:2]]
    return torch.stack(fitting).all(0) if fitting else None


def _project(module: nn.Module, part: str, projection: Projection, x: Tensor) -> Tensor:
    """Project tokens [..., D] to the heads of one part, [..., M, d]."""
    head, rows = projection.group.slices[0], projection.rows.flatten().to(x.device)
    weight, bias = head.parameter(), getattr(module, "in_proj_bias", None)
    if bias is not None:
        start = 0 if head.attribute == "in_proj_weight" else "qkv".index(part) * weight.shape[0]
        bias = bias[start + rows]
    return F.linear(x, weight[rows], bias).unflatten(-1, projection.rows.shape)
