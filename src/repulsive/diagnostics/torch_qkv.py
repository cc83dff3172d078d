"""Queries, keys and values of `nn.MultiheadAttention`, which multiplies its packed weights without a module call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from repulsive.diagnostics.qkv import Projection

Take = Callable[[str, Tensor, Tensor | None], None]  # part, heads [S, n, M, d], which tokens are not padding [S, n]
_FORWARD = inspect.signature(nn.MultiheadAttention.forward)
_READS = {"q": "query", "k": "key", "v": "value"}


def watch_torch(stack: ExitStack, part: str, projection: Projection, real: Tensor | None, take: Take) -> None:
    """Project one part of every call by hand; padding is what the call itself masks.

    Args:
        stack: takes the hook back.
        part: "q", "k" or "v".
        projection: of that part; its module is the attention.
        real: which queries are not padding, for attention to other tokens, where the call does not say.
        take: called with the heads.
    """

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = _FORWARD.bind(module, *args, **kwargs).arguments
        x, padding = given[_READS[part]], given.get("key_padding_mask")
        mask = None if padding is None else _real(padding)  # [S, n]
        if part == "q" and given["query"] is not given["key"]:
            mask = real
        heads = _project(module, part, projection, x)  # [S, n, M, d], or [n, S, M, d]
        if x.ndim == 2:
            heads, mask = heads.unsqueeze(0), None if mask is None else mask.unsqueeze(0)
        elif not module.batch_first:
            heads = heads.transpose(0, 1)
        take(part, heads, None if mask is None or mask.shape != heads.shape[:2] else mask.to(heads.device))

    stack.callback(projection.module.register_forward_pre_hook(before, with_kwargs=True).remove)


def _real(padding: Tensor) -> Tensor:
    """True where a token counts: padding is True, or minus infinity."""
    return padding == 0 if padding.is_floating_point() else ~padding


def _project(module: nn.Module, part: str, projection: Projection, x: Tensor) -> Tensor:
    """[..., D] -> [..., M, d]"""
    head, rows = projection.group.slices[0], projection.rows.flatten().to(x.device)
    weight, bias = head.parameter(), getattr(module, "in_proj_bias", None)
    if bias is not None:
        start = 0 if head.attribute == "in_proj_weight" else "qkv".index(part) * weight.shape[0]
        bias = bias[start + rows]
    return F.linear(x, weight[rows], bias).unflatten(-1, projection.rows.shape)
