"""Attention functions that take q, k and v: scaled dot-product, FlexAttention and variable-length attention."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Record = Callable[[Tensor, Tensor, Tensor], None]
_FLEX = "torch.nn.attention.flex_attention"


def repeat_for_queries(q: Tensor, *kv: Tensor) -> list[Tensor]:
    """Repeat key-value heads [.., H_kv, S, d] for the query heads they serve, as grouped attention does."""
    heads = q.shape[-3]
    return [x if x.shape[-3] in (1, heads) else x.repeat_interleave(heads // x.shape[-3], -3) for x in kv]


def dot_product_operands(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Read q, k and v from the arguments of `scaled_dot_product_attention`, and repeat key-value heads."""
    given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
    q, k, v = (given[name] for name in ("query", "key", "value"))
    if q.ndim > 2 and k.ndim == q.ndim:
        k, v = repeat_for_queries(q, k, v)
    return q, k, v


def longest_sample(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Take the sample with the most keys if q, k and v are nested tensors [B, H, *, d]; else return them unchanged."""
    if not (q.is_nested and k.is_nested and v.is_nested):
        return q, k, v
    samples = [x.transpose(1, 2).unbind() for x in (q, k, v)]  # each [T, H, d]
    i = max(range(len(samples[1])), key=lambda n: samples[1][n].shape[0])
    first, second, third = (x[i].transpose(0, 1) for x in samples)  # [H, T, d]
    return first, second, third


def varlen(args: tuple[Any, ...], record: Record) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `varlen_attn` on any device: q [T, H, d] and k, v [S, H_kv, d] with cumulative sequence lengths.

    Returns:
        The output [T, H, d], and placeholders for the log-sum-exp and the random state that the operator also returns.
    """
    q, k, v = (x.transpose(0, 1) for x in args[:3])  # [H, T, d]
    k, v = repeat_for_queries(q, k, v)
    record(q, k, v)
    ends_q, ends_k = args[3], args[4] if args[4] is not None else args[3]
    sequence_q = torch.searchsorted(ends_q, torch.arange(q.shape[1], device="cpu").to(ends_q), right=True)  # [T]
    sequence_k = torch.searchsorted(ends_k, torch.arange(k.shape[1], device="cpu").to(ends_k), right=True)  # [S]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=sequence_q[:, None] == sequence_k[None])
    return out.transpose(0, 1), out.detach().sum(-1), out.new_zeros(2)


@contextmanager
def flex_recorded(record: Record) -> Iterator[None]:
    """Record the operands of every `flex_attention` call, compiled or not; score and mask functions are skipped."""
    module = sys.modules.get(_FLEX)
    if module is None:  # never imported, so no model can call it
        yield
        return
    results = 3 if hasattr(module, "AuxOutput") else 2  # torch versions with AuxOutput also return the largest scores

    def recorded(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        k, v = repeat_for_queries(q, k, v)
        record(q, k, v)
        out = F.scaled_dot_product_attention(q, k, v)
        return (out, *[out.detach().sum(-1)] * (results - 1))

    replaced = {
        "flex_attention_hop": recorded,
        "_validate_device": lambda *_: None,  # it rejects gradients on a CPU, which the recorded call supports
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
    }
    original = {name: getattr(module, name) for name in replaced if hasattr(module, name)}
    for name in original:
        setattr(module, name, replaced[name])
    try:
        yield
    finally:
        for name, value in original.items():
            setattr(module, name, value)
