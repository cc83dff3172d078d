"""Attention over packed sentences: laid end to end instead of padded, so that all batches have one shape.

    side = Packed.of(lengths)                  # positions of sentences stored end to end
    heads = attend(qkv, side, causal=True)     # [N, 3, M, d] -> [N, M, d]: attention within each sentence
    heads = attend_to(q, kv, side, other)      # [N, M, d], [N', 2, M, d] -> [N, M, d]: to the paired sentence

On a GPU, Triton kernels (`packed_kernels`) are used for head sizes that are powers of two.
`REPULSIVE_KERNELS=eager|triton` chooses between them and the reference implementation, which pads the sentences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repulsive.triton_setting import use_triton

# Launch settings, forward and backward; BLOCK is the number of tokens of a tile. One stage: sentences seldom have a
# second tile, and buffers for it would leave room for fewer programs.
LAUNCH: tuple[dict[str, int], dict[str, int]] = (
    {"BLOCK": 32, "num_warps": 2, "num_stages": 1},
    {"BLOCK": 32, "num_warps": 2, "num_stages": 1},
)


class Packed(NamedTuple):
    """Positions of packed sentences.

    Args:
        starts: int32 [B + 1], start of each sentence, and end of the last; tokens after it are unused.
        sentences: sentence of each token, int64 [N]; B for unused tokens.
        places: position of each token in its sentence, int64 [N]; 0 for unused tokens.
        longest: upper bound on the length of a sentence.
        kernels: whether Triton may be used.
    """

    starts: Tensor
    sentences: Tensor
    places: Tensor
    longest: int
    kernels: bool

    @classmethod
    def of(cls, lengths: Tensor, rows: int | None = None, longest: int | None = None) -> Packed:
        """Compute the positions of sentences that are stored end to end.

        Args:
            lengths: length of each sentence, [B].
            rows: number of rows N, at least the sum of the lengths; None: the sum, which synchronises with a GPU.
            longest: upper bound on the lengths; None: their maximum, which synchronises with a GPU.
        """
        starts = F.pad(lengths.cumsum(0), (1, 0))  # [B + 1]
        tokens = torch.arange(int(starts[-1]) if rows is None else rows, device=lengths.device)
        sentences = torch.searchsorted(starts[1:], tokens, right=True)  # [N]
        places = torch.where(tokens < starts[-1], tokens - starts[sentences], 0)
        longest = int(lengths.max()) if longest is None and len(lengths) else longest or 0
        return cls(starts.int(), sentences, places, longest, use_triton(lengths.device.type, oldest=(3, 6)))


def attend(qkv: Tensor, side: Packed, causal: bool) -> Tensor:
    """Compute scaled dot-product attention within each sentence.

    Args:
        qkv: queries, keys and values, [N, 3, M, d].
        side: positions of the sentences.
        causal: a query attends to keys up to its own position.

    Returns:
        [N, M, d]; zeros for unused tokens.
    """
    if side.kernels and _supported(qkv):
        heads: Tensor = _within(qkv, side.starts, causal)[0]
        return heads
    q, k, v = qkv.unbind(1)
    return _by_padding(q, k, v, side, side, causal)


def attend_to(q: Tensor, kv: Tensor, queries: Packed, keys: Packed) -> Tensor:
    """Compute scaled dot-product attention from each sentence to the sentence with the same index.

    Args:
        q: queries, [N, M, d].
        kv: keys and values, [N', 2, M, d].
        queries: positions of the sentences of q.
        keys: positions of the sentences of kv.

    Returns:
        [N, M, d]; zeros for unused tokens.
    """
    if queries.kernels and _supported(q):
        heads: Tensor = _across(q, kv, queries.starts, keys.starts)[0]
        return heads
    k, v = kv.unbind(1)
    return _by_padding(q, k, v, queries, keys, False)


def padding_mask(side: Packed) -> Tensor:
    """Return False where packed sentences would be padded, bool [B, longest]."""
    return torch.arange(max(1, side.longest), device=side.starts.device) < side.starts.diff().unsqueeze(1)


def call_padded(module: nn.Module, x: Tensor, side: Packed) -> Tensor:
    """Call a module on packed sentences as if they were padded.

    Args:
        module: function of one token at a time.
        x: packed sentences, [N, D].
        side: positions of the sentences.

    Returns:
        [N, D']; zeros for unused tokens.
    """
    count = len(side.starts) - 1
    table = x.new_zeros(count + 1, max(1, side.longest), x.shape[-1]).index_put((side.sentences, side.places), x)
    output = F.pad(module(table[:count]), (0, 0, 0, 0, 0, 1))  # [B + 1, T, D'], the last row for unused tokens
    return output[side.sentences, side.places]


def _supported(q: Tensor) -> bool:
    dim = q.shape[-1]
    # Triton's interpreter, on CPUs, has no bfloat16.
    dtype = q.dtype in (torch.float32, torch.float16) or (q.dtype == torch.bfloat16 and q.is_cuda)
    return dtype and 16 <= dim <= 128 and dim & (dim - 1) == 0 and q.numel() > 0


def _by_padding(q: Tensor, k: Tensor, v: Tensor, queries: Packed, keys: Packed, causal: bool) -> Tensor:
    count = len(queries.starts) - 1
    q, k, v = (_padded(x, side, count) for x, side in ((q, queries), (k, keys), (v, keys)))  # [B + 1, M, T, d]
    mask = F.pad(padding_mask(keys), (0, 0, 0, 1))[:, None, None, :]  # [B + 1, 1, 1, S]
    if causal:
        mask = mask & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=k.device).tril()
    heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # [B + 1, M, T, d]
    heads = heads.masked_fill(~mask.any(-1, keepdim=True), 0.0)  # queries without keys would be nan
    return heads[queries.sentences, :, queries.places]


def _padded(x: Tensor, side: Packed, count: int) -> Tensor:
    """Pad packed sentences: [N, M, d] -> [B + 1, M, T, d]; the last row is for unused tokens, and stays zero."""
    table = x.new_zeros(count + 1, max(1, side.longest), *x.shape[1:])
    real = x.masked_fill((side.sentences == count)[:, None, None], 0.0)
    return table.index_put((side.sentences, side.places), real).transpose(1, 2)


@torch.library.custom_op("repulsive::attention_within", mutates_args=())
def _within(qkv: Tensor, starts: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    q, k, v = _rows(qkv).unbind(1)
    return _forward(q, k, v, starts, starts, causal)


@torch.library.custom_op("repulsive::attention_across", mutates_args=())
def _across(q: Tensor, kv: Tensor, q_starts: Tensor, k_starts: Tensor) -> tuple[Tensor, Tensor]:
    k, v = _rows(kv).unbind(1)
    return _forward(_rows(q), k, v, q_starts, k_starts, False)


@torch.library.custom_op("repulsive::attention_within_backward", mutates_args=())
def _within_backward(grad: Tensor, qkv: Tensor, starts: Tensor, out: Tensor, sums: Tensor, causal: bool) -> Tensor:
    of_qkv = qkv.new_empty(qkv.shape)
    q, k, v = _rows(qkv).unbind(1)
    _backward(grad, (q, k, v), (out, sums), of_qkv.unbind(1), starts, starts, causal)
    return of_qkv


@torch.library.custom_op("repulsive::attention_across_backward", mutates_args=())
def _across_backward(
    grad: Tensor, q: Tensor, kv: Tensor, q_starts: Tensor, k_starts: Tensor, out: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor]:
    of_q, of_kv = q.new_empty(q.shape), kv.new_empty(kv.shape)
    k, v = _rows(kv).unbind(1)
    _backward(grad, (_rows(q), k, v), (out, sums), (of_q, *of_kv.unbind(1)), q_starts, k_starts, False)
    return of_q, of_kv


@_within.register_fake
def _(qkv: Tensor, starts: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    rows, _, heads, dim = qkv.shape
    return qkv.new_empty(rows, heads, dim), qkv.new_empty(rows, heads, dtype=torch.float32)


@_across.register_fake
def _(q: Tensor, kv: Tensor, q_starts: Tensor, k_starts: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@_within_backward.register_fake
def _(grad: Tensor, qkv: Tensor, starts: Tensor, out: Tensor, sums: Tensor, causal: bool) -> Tensor:
    return qkv.new_empty(qkv.shape)


@_across_backward.register_fake
def _(
    grad: Tensor, q: Tensor, kv: Tensor, q_starts: Tensor, k_starts: Tensor, out: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), kv.new_empty(kv.shape)


def _save_within(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, starts, ctx.causal = inputs
    ctx.save_for_backward(qkv, starts, *output)


def _save_across(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


_within.register_autograd(
    lambda ctx, grad, _: (_within_backward(grad, *ctx.saved_tensors, ctx.causal), None, None),
    setup_context=_save_within,
)
_across.register_autograd(
    lambda ctx, grad, _: (*_across_backward(grad, *ctx.saved_tensors), None, None), setup_context=_save_across
)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    from repulsive.lab.layers import packed_kernels

    rows, heads, dim = q.shape
    out, sums = q.new_empty(rows, heads, dim), q.new_empty(rows, heads, dtype=torch.float32)
    count = len(q_starts) - 1
    with torch.cuda.device_of(q):
        packed_kernels.forward_kernel[(count + packed_kernels.TAIL, heads)](
            q,
            k,
            v,
            out,
            sums,
            q_starts,
            k_starts,
            count,
            rows,
            math.log2(math.e) / math.sqrt(dim),
            q.stride(0),
            k.stride(0),
            HEADS=heads,
            DIM=dim,
            CAUSAL=causal,
            TAIL=packed_kernels.TAIL,
            **LAUNCH[0],
        )
    return out, sums


def _backward(
    grad: Tensor,
    qkv: Sequence[Tensor],
    results: Sequence[Tensor],
    into: Sequence[Tensor],
    q_starts: Tensor,
    k_starts: Tensor,
    causal: bool,
) -> None:
    from repulsive.lab.layers import packed_kernels

    q, k, _ = qkv
    rows, heads, dim = q.shape
    count, factor = len(q_starts) - 1, 1 / math.sqrt(dim)
    with torch.cuda.device_of(q):
        packed_kernels.backward_kernel[(count + packed_kernels.TAIL, heads)](
            *qkv,
            grad.contiguous(),
            *results,
            *into,
            q_starts,
            k_starts,
            count,
            rows,
            len(k),
            math.log2(math.e) * factor,
            factor,
            q.stride(0),
            k.stride(0),
            into[0].stride(0),
            into[1].stride(0),
            HEADS=heads,
            DIM=dim,
            CAUSAL=causal,
            TAIL=packed_kernels.TAIL,
            **LAUNCH[1],
        )


def _rows(x: Tensor) -> Tensor:
    """Make all but the first axis contiguous, as the kernels expect; rows may have any stride."""
    packed = x.stride()[1:] == x[:1].contiguous().stride()[1:]
    return x if packed else x.contiguous()
