"""Triton kernel `column_gram_kernel`: `gram_kernel` for up to about 16 heads, with sums in registers.

A thread holds one sum for each pair of heads, 78 for 12 heads, and adds the products of its columns to them. The sums
of all threads are added up once, after the last column. See `columns` for the reasons, and `gram` for what is computed.

Pair k is (i, j) = (k mod M, (i + k div M) mod M): k = 0 ... M - 1 are the pairs (i, i), the next M are the neighbours
(i, i + 1), and so on, until each of the M (M + 1) / 2 pairs has occurred once.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005  Triton cannot unpack a tuple inside another one
import triton
import triton.language as tl

from repulsive.repulsion.backends.triton_kernels.columns import centre, load_heads
from repulsive.repulsion.backends.triton_kernels.gram import sum_squares
from repulsive.repulsion.backends.triton_kernels.slices import (
    column_range,
    element_indices,
    head_starts,
    load_address,
    load_sizes,
    load_strides,
)


@triton.jit
def _zeros(COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Make a tuple of COUNT tensors of zeros, [SIZE]."""
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (tl.zeros([SIZE], dtype=tl.float32),)
    return sums


@triton.jit
def _separate(values, COUNT: tl.constexpr):
    """Separate even from odd columns of COUNT tensors."""
    even, odd = (), ()
    for i in tl.static_range(COUNT):
        first, second = tl.split(tl.reshape(values[i], [values[i].shape[0] // 2, 2]))
        even, odd = even + (first,), odd + (second,)
    return even, odd


@triton.jit
def _add(sums, values, M: tl.constexpr):
    """Add products of all pairs of M heads, of each head with the mean head (the last value), and of the mean."""
    pairs: tl.constexpr = M * (M + 1) // 2
    out = ()
    for k in tl.static_range(pairs):
        out = out + (tl.fma(values[k % M], values[(k + k // M) % M], sums[k]),)
    for i in tl.static_range(M + 1):
        out = out + (tl.fma(values[i], values[M], sums[pairs + i]),)
    return out


@triton.jit
def _add_columns(sums, values, M: tl.constexpr, WIDTH: tl.constexpr):
    """Add the products of blocks of columns to sums, WIDTH columns to each sum."""
    if WIDTH == 1:
        sums = _add(sums, values, M)
    else:
        even, odd = _separate(values, M + 1)
        if WIDTH == 2:
            sums = _add(_add(sums, even, M), odd, M)
        else:
            first, third = _separate(even, M + 1)
            second, fourth = _separate(odd, M + 1)
            sums = _add(_add(sums, first, M), second, M)
            sums = _add(_add(sums, third, M), fourth, M)
    return sums


@triton.jit
def _fold(sums, COUNT: tl.constexpr, STEP: tl.constexpr):
    """Add up the sums of pairs of threads, STEP apart: one thread keeps sums 0, 2, 4, ..., the other 1, 3, 5, ..."""
    zero = tl.zeros_like(sums[0])  # [warps, 32]
    thread = tl.arange(0, 32)[None, :] + zero.to(tl.int32)
    is_odd = (thread & STEP) != 0
    out = ()
    for k in tl.static_range(0, COUNT, 2):
        odd = sums[k + 1] if k + 1 < COUNT else zero
        sent = tl.where(is_odd, sums[k], odd)
        out = out + (tl.where(is_odd, odd, sums[k]) + tl.gather(sent, thread ^ STEP, axis=1),)
    return out


@triton.jit
def _add_threads(sums, COUNT: tl.constexpr):
    """Add up the sums of all threads: element t of result n is sum 32 n + t.

    Threads exchange halves of their sums in five steps, which takes a fifth of the instructions of `tl.sum`.
    """
    parts = ()
    for k in tl.static_range(COUNT):
        parts = parts + (tl.reshape(sums[k], [sums[k].shape[0] // 32, 32]),)
    for level in tl.static_range(5):
        parts = _fold(parts, (COUNT + (1 << level) - 1) >> level, 1 << level)
    totals = ()
    for n in tl.static_range((COUNT + 31) // 32):
        totals = totals + (tl.sum(parts[n], axis=0),)  # over warps
    return totals


@triton.jit
def column_gram_kernel(
    table,
    pointers,
    products,
    to_mean,
    mean2,
    M: tl.constexpr,
    MP: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    FLAT: tl.constexpr,
    INNER: tl.constexpr,
    CHUNKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    APART: tl.constexpr,
    NORMS: tl.constexpr,
):
    """Compute the same as `gram_kernel`, except for rows and columns from M on, which are not written.

    A thread reads WIDTH adjacent columns, 1, 2 or 4, so BLOCK is WIDTH times the number of threads.
    """
    piece, split, source = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slices, splits = tl.num_programs(0), tl.num_programs(1)
    row = table + piece * COLUMNS
    head_stride, size = load_sizes(row, ALIGNED)
    base = load_address(pointers, piece, source, KIND, ALIGNED)
    first, last = column_range(size, split, splits, BLOCK, ALIGNED)
    out = (source * slices + piece) * splits + split
    is_norm = 0  # as in `gram_kernel`
    if NORMS:
        is_norm = source
    if is_norm == 1:
        heads = tl.arange(0, MP)
        starts = head_starts(pointers, slices, piece, source, heads, head_stride, MP, ALIGNED, APART)
        norms2 = sum_squares(base, row, starts, first, last, M, MP, BLOCK, FLAT, INNER, CHUNKED)
        tl.store(products + out * MP * MP + heads * (MP + 1), norms2)
        tl.store(mean2 + out, 0.0)
    else:
        pairs: tl.constexpr = M * (M + 1) // 2
        sums = _zeros(pairs + M + 1, BLOCK // WIDTH)
        inner, outer_stride, inner_stride = load_strides(row, INNER)
        for start in range(first, last, BLOCK):
            column = tl.multiple_of(start, BLOCK) + tl.arange(0, BLOCK)
            offset = element_indices(column, inner, outer_stride, inner_stride, FLAT, CHUNKED)
            x = load_heads(
                base, pointers, piece, source, head_stride, offset, column < last, M, MP, CHUNKED, ALIGNED, APART
            )
            centred, mean = centre(x, M)
            sums = _add_columns(sums, centred + (mean,), M, WIDTH)
        totals = _add_threads(sums, pairs + M + 1)
        matrix = products + out * MP * MP
        for n in tl.static_range((pairs + M + 32) // 32):
            k = n * 32 + tl.arange(0, 32)
            i, j = k % M, (k + k // M) % M
            tl.store(matrix + i * MP + j, totals[n], mask=k < pairs)
            tl.store(matrix + j * MP + i, totals[n], mask=k < pairs)
            tl.store(to_mean + out * MP + k - pairs, totals[n], mask=(k >= pairs) & (k < pairs + M))
            tl.store(mean2 + out + k * 0, totals[n], mask=k == pairs + M)
