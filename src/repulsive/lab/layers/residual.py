"""Compute norm(x + dropout(change)), as in a post-norm Transformer, with one launch forward and one backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

ROWS = (2, 4)  # rows of a tile, forward and backward
WARPS = (2, 2)
PROGRAMS = 1056  # programs of the backward pass: as many as a large GPU runs at once
_BITS = 24  # bits of a random number


def add_norm(x: Tensor, change: Tensor, norm: nn.LayerNorm, dropout: float, seed: Tensor) -> Tensor:
    """Compute norm(x + dropout(change)) in the dtype of `change`, with float32 statistics: [N, width] each.

    Args:
        x: input of the block.
        change: output of the block.
        norm: LayerNorm over the last axis, with weight and bias.
        dropout: dropout probability.
        seed: random seed of the dropout mask, int64 [].
    """
    out: Tensor = _add_norm(x, change, norm.weight, norm.bias, seed, dropout, norm.eps)[0]
    return out


def supported(x: Tensor) -> bool:
    """Whether a row fits in the registers of a program."""
    return x.ndim == 2 and 0 < x.shape[1] <= 2048 and x.numel() < 2**32


@torch.library.custom_op("repulsive::add_norm", mutates_args=())
def _add_norm(
    x: Tensor, change: Tensor, weight: Tensor, bias: Tensor, seed: Tensor, dropout: float, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from repulsive.lab.layers import residual_kernels

    rows, width = x.shape
    x, change = x.contiguous(), change.contiguous()
    out, total = torch.empty_like(change), torch.empty_like(change)
    means, scales = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    with torch.cuda.device_of(x):
        residual_kernels.forward_kernel[(-(-rows // ROWS[0]),)](
            x,
            change,
            weight,
            bias,
            seed,
            out,
            total,
            means,
            scales,
            rows,
            *_drop(dropout),
            eps,
            ROWS=ROWS[0],
            num_warps=WARPS[0],
            **_shape(width),
        )
    return out, total, means, scales


@torch.library.custom_op("repulsive::add_norm_backward", mutates_args=())
def _backward(
    grad: Tensor,
    total: Tensor,
    means: Tensor,
    scales: Tensor,
    weight: Tensor,
    seed: Tensor,
    dropout: float,
    like_x: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    from repulsive.lab.layers import residual_kernels

    rows, width = total.shape
    of_x, of_change = torch.empty_like(total, dtype=like_x), torch.empty_like(total)
    programs = max(1, min(PROGRAMS, -(-rows // ROWS[1])))
    parts = total.new_empty(programs, 2, width, dtype=torch.float32)
    with torch.cuda.device_of(total):
        residual_kernels.backward_kernel[(programs,)](
            grad.contiguous(),
            total,
            weight,
            seed,
            means,
            scales,
            of_x,
            of_change,
            parts,
            rows,
            *_drop(dropout),
            ROWS=ROWS[1],
            num_warps=WARPS[1],
            **_shape(width),
        )
    return of_x, of_change, parts.sum(0)


@_add_norm.register_fake
def _(
    x: Tensor, change: Tensor, weight: Tensor, bias: Tensor, seed: Tensor, dropout: float, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    row = x.new_empty(x.shape[0], dtype=torch.float32)
    return change.new_empty(change.shape), change.new_empty(change.shape), row, torch.empty_like(row)


@_backward.register_fake
def _(
    grad: Tensor,
    total: Tensor,
    means: Tensor,
    scales: Tensor,
    weight: Tensor,
    seed: Tensor,
    dropout: float,
    like_x: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    of_x, of_change = torch.empty_like(total, dtype=like_x), torch.empty_like(total)
    return of_x, of_change, total.new_empty(2, total.shape[1], dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, weight, _, seed, ctx.dropout, _ = inputs
    ctx.kind = x.dtype
    ctx.save_for_backward(*output[1:], weight, seed)


def _differentiate(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    of_x, of_change, of_norm = _backward(grad, *ctx.saved_tensors, ctx.dropout, ctx.kind)
    return of_x, of_change, of_norm[0], of_norm[1], None, None, None


_add_norm.register_autograd(_differentiate, setup_context=_save)


def _drop(dropout: float) -> tuple[int, float]:
    """Return the threshold for the random numbers of kept elements, and the factor of their values."""
    return round(dropout * 2**_BITS), 1 / (1 - dropout)


def _shape(width: int) -> dict[str, int]:
    return {"WIDTH": width, "PADDED": max(16, 1 << (width - 1).bit_length())}
