"""Triton kernel `gram_kernel`: inner products of the heads of every slice.

With x_i [D] the heads, mu their mean and c_i = x_i - mu, the launch computes

    products[i, j] = c_i . c_j    to_mean[i] = c_i . mu    mean2 = mu . mu

so that |x_i - x_j|^2 = products[i, i] + products[j, j] - 2 products[i, j], and
x_i . x_j = products[i, j] + to_mean[i] + to_mean[j] + mean2, as in `particles.gram`. Each program sums over its own
range of columns, in float32; `solve_kernel` adds these partial sums in float64.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from repulsive.repulsion.backends.triton_kernels.products import add_squares
from repulsive.repulsion.backends.triton_kernels.slices import (
    column_range,
    head_starts,
    load_address,
    load_block,
    load_sizes,
    load_strides,
)


@triton.jit
def sum_squares(
    base,
    row,
    starts,
    first,
    last,
    M: tl.constexpr,
    MP: tl.constexpr,
    BLOCK: tl.constexpr,
    FLAT: tl.constexpr,
    INNER: tl.constexpr,
    CHUNKED: tl.constexpr,
):
    """Sum the squares of a range of columns of every head, [MP]."""
    heads = tl.arange(0, MP)
    inner, outer_stride, inner_stride = load_strides(row, INNER)
    total = tl.zeros([MP, BLOCK], dtype=tl.float32)
    for start in range(first, last, BLOCK):
        x, _ = load_block(base, start, last, heads, starts, inner, outer_stride, inner_stride, M, BLOCK, FLAT, CHUNKED)
        total += x * x
    return tl.sum(total, axis=1)


@triton.jit
def _products(
    base,
    row,
    starts,
    first,
    last,
    M: tl.constexpr,
    MP: tl.constexpr,
    BLOCK: tl.constexpr,
    FLAT: tl.constexpr,
    INNER: tl.constexpr,
    CHUNKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply centred heads with each other [MP, MP] and with their mean [MP], and the mean with itself."""
    heads = tl.arange(0, MP)
    wide: tl.constexpr = MP >= 16
    if not wide:
        total = tl.zeros([MP, MP, BLOCK], dtype=tl.float32)
        with_mean = tl.zeros([MP, BLOCK], dtype=tl.float32)
    else:
        total = tl.zeros([MP, MP], dtype=tl.float32)
        rest = tl.zeros([MP, MP], dtype=tl.float32)  # see `add_squares`
        with_mean = tl.zeros([MP], dtype=tl.float32)
    of_mean = tl.zeros([BLOCK], dtype=tl.float32)
    inner, outer_stride, inner_stride = load_strides(row, INNER)
    for start in range(first, last, BLOCK):
        x, inside = load_block(
            base, start, last, heads, starts, inner, outer_stride, inner_stride, M, BLOCK, FLAT, CHUNKED
        )
        mean = tl.sum(x, axis=0) / M
        centred = tl.where(inside, x - mean[None, :], 0.0)
        if not wide:
            total += centred[:, None, :] * centred[None, :, :]
            with_mean += centred * mean[None, :]
        else:
            with_mean += tl.sum(centred * mean[None, :], axis=1)
            total, rest = add_squares(total, rest, centred, PRECISION)
        of_mean += mean * mean
    if not wide:
        total = tl.sum(total, axis=2)
        with_mean = tl.sum(with_mean, axis=1)
    elif PRECISION == "split":
        total += rest + tl.trans(rest)
    return total, with_mean, tl.sum(of_mean, axis=0)


@triton.jit
def gram_kernel(
    table,
    pointers,
    products,
    to_mean,
    mean2,
    M: tl.constexpr,
    MP: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    FLAT: tl.constexpr,
    INNER: tl.constexpr,
    CHUNKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    APART: tl.constexpr,
    NORMS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute partial Gram matrices of centred heads [sources, slices, splits, MP, MP], with products of the mean head.

    The axes of the grid are slices, programs that share a slice, and one or two sources: 0 is the weights, 1 the
    gradients. With NORMS only the squared norms of gradients are written: to the diagonal, not centred, with a mean of
    zero.
    """
    piece, split, source = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slices, splits = tl.num_programs(0), tl.num_programs(1)
    row = table + piece * COLUMNS
    head_stride, size = load_sizes(row, ALIGNED)
    base = load_address(pointers, piece, source, KIND, ALIGNED)
    heads = tl.arange(0, MP)
    starts = head_starts(pointers, slices, piece, source, heads, head_stride, MP, ALIGNED, APART)
    first, last = column_range(size, split, splits, BLOCK, ALIGNED)
    out = (source * slices + piece) * splits + split
    # `NORMS & (source == 1)` would do, but the interpreter of Triton 3.2 cannot compute it.
    is_norm = 0
    if NORMS:
        is_norm = source
    if is_norm == 1:
        norms2 = sum_squares(base, row, starts, first, last, M, MP, BLOCK, FLAT, INNER, CHUNKED)
        tl.store(products + out * MP * MP + heads * (MP + 1), norms2)
        tl.store(mean2 + out, 0.0)
    else:
        total, with_mean, of_mean = _products(
            base, row, starts, first, last, M, MP, BLOCK, FLAT, INNER, CHUNKED, PRECISION
        )
        tl.store(products + out * MP * MP + heads[:, None] * MP + heads[None, :], total)
        tl.store(to_mean + out * MP + heads, with_mean)
        tl.store(mean2 + out, of_mean)
