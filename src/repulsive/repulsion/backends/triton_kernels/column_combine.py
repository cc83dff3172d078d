"""Triton kernel `column_combine_kernel`: `combine_kernel` for up to about 16 heads, with columns in registers.

A thread reads its columns of all gradients and weights, and computes one head of the result after the other.
Coefficients are loaded when they are needed, from the L1 cache, and multiplied with all columns of the thread. See
`columns` for the reasons, and `combine` for the formulas.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005  Triton cannot unpack a tuple inside another one
import triton
import triton.language as tl

from repulsive.repulsion.backends.triton_kernels.columns import centre, load_heads
from repulsive.repulsion.backends.triton_kernels.combine import index_in_head
from repulsive.repulsion.backends.triton_kernels.noise import standard_normal
from repulsive.repulsion.backends.triton_kernels.slices import (
    column_range,
    element_indices,
    head_offsets,
    head_starts,
    load_address,
    load_sizes,
    load_strides,
)


@triton.jit
def _load_four(coefficients, THREADS: tl.constexpr, WIDTH: tl.constexpr):
    """Load four coefficients at once, into every thread: a tuple of four tensors [BLOCK], each of equal numbers."""
    place = tl.zeros([THREADS, 1], dtype=tl.int32) + tl.arange(0, 4)[None, :]
    loaded = tl.load(coefficients + place, eviction_policy="evict_last")  # stays in the L1 cache
    even, odd = tl.split(tl.reshape(loaded, [THREADS, 2, 2]))
    four = tl.split(even) + tl.split(odd)  # coefficients 0, 2, 1, 3
    out = ()
    for k in tl.static_range(4):
        wide = tl.broadcast_to(four[k // 2 + k % 2 * 2][:, None], [THREADS, WIDTH])
        out = out + (tl.reshape(wide, [THREADS * WIDTH]),)
    return out


@triton.jit
def _add_product(out, coefficients, values, M: tl.constexpr, MP: tl.constexpr, WIDTH: tl.constexpr):
    """Add the sum of M coefficients times values, [BLOCK]."""
    if MP < 4:
        for k in tl.static_range(M):
            out = tl.fma(values[k], tl.load(coefficients + k), out)
    else:
        for first in tl.static_range(0, M, 4):
            four = _load_four(coefficients + first, out.shape[0] // WIDTH, WIDTH)
            for k in tl.static_range(4):
                if first + k < M:
                    out = tl.fma(values[first + k], four[k], out)
    return out


@triton.jit
def column_combine_kernel(
    table,
    pointers,
    drive,
    force,
    row_sums,
    scale,
    sigmas,
    steps,
    shards,
    M: tl.constexpr,
    MP: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    UNROLL: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    FLAT: tl.constexpr,
    INNER: tl.constexpr,
    CHUNKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    APART: tl.constexpr,
    SHARDED: tl.constexpr,
    SCALED: tl.constexpr,
    NOISE: tl.constexpr,
    FORCE: tl.constexpr,
    SCALAR: tl.constexpr,
):
    """Compute the same as `combine_kernel`, with the same arguments.

    A thread reads WIDTH adjacent columns, 1, 2 or 4, so BLOCK is WIDTH times the number of threads. The code for a head
    is repeated UNROLL times.
    """
    piece, split = tl.program_id(0), tl.program_id(1)
    slices = tl.num_programs(0)
    row = table + piece * COLUMNS
    head_stride, size = load_sizes(row, ALIGNED)
    group = tl.load(row + 7)
    theta, grad = load_address(pointers, piece, 0, KIND, ALIGNED), load_address(pointers, piece, 1, KIND, ALIGNED)
    first, last = column_range(size, split, tl.num_programs(1), BLOCK, ALIGNED)
    whole_size = tl.load(shards + piece * 4 + 3) if SHARDED else size
    factor = 1.0
    if SCALED:
        factor = tl.load(scale).to(tl.float32)
    drive += group * MP * MP
    force += group * MP * MP
    row_sums += group * MP
    inner, outer_stride, inner_stride = load_strides(row, INNER)
    outer_element, inner_element = tl.load(row + 5), tl.load(row + 6)
    for start in range(first, last, BLOCK):
        column = tl.multiple_of(start, BLOCK) + tl.arange(0, BLOCK)
        offset = element_indices(column, inner, outer_stride, inner_stride, FLAT, CHUNKED)
        there = column < last
        if not SCALAR:
            g = load_heads(grad, pointers, piece, 1, head_stride, offset, there, M, MP, CHUNKED, ALIGNED, APART)
        if FORCE:
            t = load_heads(theta, pointers, piece, 0, head_stride, offset, there, M, MP, CHUNKED, ALIGNED, APART)
            t, mean = centre(t, M)
        if NOISE:
            element = index_in_head(column, inner, outer_element, inner_element, shards + piece * 4, FLAT, SHARDED)
        for i in tl.range(0, M, loop_unroll_factor=UNROLL):
            begin = head_starts(pointers, slices, piece, 1, i, head_stride, MP, ALIGNED, APART)
            place = grad + head_offsets(begin, offset, CHUNKED)
            if FORCE:
                out = _add_product(tl.load(row_sums + i) * mean, force + i * MP, t, M, MP, WIDTH)
                if SCALED:
                    out *= factor
            else:
                out = tl.zeros([BLOCK], dtype=tl.float32)
            if SCALAR:
                out += tl.load(drive) * tl.load(place, mask=there, other=0.0).to(tl.float32)
            else:
                out = _add_product(out, drive + i * MP, g, M, MP, WIDTH)
            if NOISE:
                noise = standard_normal(tl.load(row + 8), tl.load(steps), i * whole_size.to(tl.int64), element)
                out += noise * (tl.load(sigmas + piece) * factor)
            tl.store(place, out.to(KIND), mask=there)
