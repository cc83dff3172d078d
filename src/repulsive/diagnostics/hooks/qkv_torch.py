"""Record queries, keys and values of `nn.MultiheadAttention`, which has no projection modules to hook."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repulsive.diagnostics.hooks.qkv_layers import Projection

Keep = Callable[[str, Tensor, Tensor | None], None]  # part, heads [S, n, M, d], mask without padding [S, n]
_SIGNATURE = inspect.signature(nn.MultiheadAttention.forward)
_INPUTS = {"q": "query", "k": "key", "v": "value"}


def hook_torch(stack: ExitStack, part: str, projection: Projection, real: Tensor | None, keep: Keep) -> None:
    """Hook the attention module to compute q, k or v of every call, without keys that the call masks as padding.

    Args:
        stack: exit stack that removes the hook when it closes.
        part: "q", "k" or "v".
        projection: the projection of that part; its module is the attention.
        real: which tokens count, bool [S, n]; None if there is no mask.
        keep: called with the part, the heads and the mask.
    """

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = _SIGNATURE.bind(module, *args, **kwargs).arguments
        masks = [real]
        if part != "q" or arguments["query"] is arguments["key"]:
            masks.append(_without_padding(arguments.get("key_padding_mask")))
        heads = _project(module, part, projection, arguments[_INPUTS[part]])  # [S, n, M, d], [n, S, M, d] or [n, M, d]
        if heads.ndim == 3:
            heads = heads.unsqueeze(0)
        elif not module.batch_first:
            heads = heads.transpose(0, 1)
        keep(part, heads, _intersect(masks, heads))

    stack.callback(projection.module.register_forward_pre_hook(before, with_kwargs=True).remove)


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
