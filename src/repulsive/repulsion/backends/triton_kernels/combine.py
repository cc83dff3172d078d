"""Triton kernel `combine_kernel`: the new gradients of every slice.

    grad <- A grad + s (B theta + sigma xi)

A and B [M, M] come from `solve_kernel`, theta and grad [M, D] are read in place, xi [M, D] is standard normal noise,
and s is the loss scale, 1 without one. The mean head mu is subtracted first, because heads may be nearly equal:
B theta = B (theta - mu) + row_sums mu, with the row sums of B that `solve_kernel` computed in float64.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from repulsive.repulsion.backends.triton_kernels.noise import standard_normal_block
from repulsive.repulsion.backends.triton_kernels.products import product
from repulsive.repulsion.backends.triton_kernels.slices import (
    block_offsets,
    column_range,
    element_indices,
    head_offsets,
    head_starts,
    load_address,
    load_sizes,
    load_strides,
)


@triton.jit
def index_in_head(column, inner, outer_element, inner_element, shard, FLAT: tl.constexpr, SHARDED: tl.constexpr):
    """Compute the indices of columns in their whole head, on which noise depends; see `combine_kernel`."""
    element = element_indices(column, inner, outer_element, inner_element, FLAT)
    if SHARDED:
        length = tl.load(shard)
        run = element.to(tl.int32) // length.to(tl.int32)  # 64-bit divisions are slow
        element += run * (tl.load(shard + 1) - length) + tl.load(shard + 2)
    return element


@triton.jit
def combine_kernel(
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
    PRECISION: tl.constexpr,
):
    """Write the new gradients in place: grad <- A grad + B theta + sigma xi; B is zero without FORCE.

    The axes of the grid are slices, and programs that share a slice. With SCALAR, A is a multiple of the identity, and
    no product of matrices is needed for A grad.

    Noise depends on the index of an element in its head. With SHARDED, a head is a part of a larger one: runs of
    adjacent elements, at equal distances. `shards` [slices, 4] has the length of a run, the distance between the starts
    of two runs, the index of the first element, and the number of elements of the whole head.
    """
    piece, split = tl.program_id(0), tl.program_id(1)
    slices = tl.num_programs(0)
    row = table + piece * COLUMNS
    head_stride, size = load_sizes(row, ALIGNED)
    group = tl.load(row + 7)
    theta, grad = load_address(pointers, piece, 0, KIND, ALIGNED), load_address(pointers, piece, 1, KIND, ALIGNED)
    heads = tl.arange(0, MP)
    grad_starts = head_starts(pointers, slices, piece, 1, heads, head_stride, MP, ALIGNED, APART)
    if APART:
        theta_starts = head_starts(pointers, slices, piece, 0, heads, head_stride, MP, ALIGNED, APART)
    else:
        theta_starts = grad_starts
    first, last = column_range(size, split, tl.num_programs(1), BLOCK, ALIGNED)
    sums = tl.load(row_sums + group * MP + heads)
    whole_size = tl.load(shards + piece * 4 + 3) if SHARDED else size
    factor = 1.0
    if SCALED:
        factor = tl.load(scale).to(tl.float32)
    matrix = group * MP * MP + heads[:, None] * MP + heads[None, :]
    if SCALAR:
        multiple = tl.load(drive + group * MP * MP)
    elif MP >= 16:
        a = tl.load(drive + matrix)
    if MP >= 16:
        b = tl.load(force + matrix)
    inner, outer_stride, inner_stride = load_strides(row, INNER)
    outer_element, inner_element = tl.load(row + 5), tl.load(row + 6)
    for start in range(first, last, BLOCK):
        column = tl.multiple_of(start, BLOCK) + tl.arange(0, BLOCK)
        offset = element_indices(column, inner, outer_stride, inner_stride, FLAT)
        place = block_offsets(grad_starts, offset, CHUNKED)
        there = column < last
        inside = (heads[:, None] < M) & there[None, :]
        if SCALAR or MP >= 16:
            g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
            if SCALAR:
                out = multiple * g
            else:
                out = product(a, g, PRECISION)
        else:
            out = tl.zeros([MP, BLOCK], dtype=tl.float32)
            for k in tl.static_range(M):
                begin = head_starts(pointers, slices, piece, 1, k, head_stride, MP, ALIGNED, APART)
                g = tl.load(grad + head_offsets(begin, offset, CHUNKED), mask=there, other=0.0).to(tl.float32)
                out += tl.load(drive + group * MP * MP + heads * MP + k)[:, None] * g[None, :]
        if FORCE:
            if MP >= 16:
                t = tl.load(theta + block_offsets(theta_starts, offset, CHUNKED), mask=inside, other=0.0)
                t = t.to(tl.float32)
                mean = tl.sum(t, axis=0) / M
                t = tl.where(inside, t - mean[None, :], 0.0)
                push = product(b, t, PRECISION) + sums[:, None] * mean[None, :]
            else:
                mean = tl.zeros([BLOCK], dtype=tl.float32)
                for k in tl.static_range(M):
                    begin = head_starts(pointers, slices, piece, 0, k, head_stride, MP, ALIGNED, APART)
                    mean += tl.load(theta + head_offsets(begin, offset, CHUNKED), mask=there, other=0.0).to(tl.float32)
                mean = mean / M
                push = sums[:, None] * mean[None, :]
                for k in tl.static_range(M):
                    begin = head_starts(pointers, slices, piece, 0, k, head_stride, MP, ALIGNED, APART)
                    t = tl.load(theta + head_offsets(begin, offset, CHUNKED), mask=there, other=0.0).to(tl.float32)
                    t = t - mean
                    push += tl.load(force + group * MP * MP + heads * MP + k)[:, None] * t[None, :]
            out += push * factor
        if NOISE:
            element = index_in_head(column, inner, outer_element, inner_element, shards + piece * 4, FLAT, SHARDED)
            # Loaded here, not before the loop: with fewer registers more programs run at once.
            noise = standard_normal_block(tl.load(row + 8), tl.load(steps), heads.to(tl.int64) * whole_size, element)
            out += noise * (tl.load(sigmas + piece) * factor)
        tl.store(grad + place, out.to(KIND), mask=inside)
