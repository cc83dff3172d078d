"""Triton kernels for norm(x + dropout(change)), forward and backward. The dropout mask is recomputed, not stored."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def _mix(bits):
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def _kept(seed, element, limit):
    """Whether an element is kept: compare 24 bits of a hash of its number and the seed with the limit."""
    high = _mix((seed >> 32).to(tl.uint32))
    low = _mix(seed.to(tl.uint32) ^ high)
    bits = _mix(_mix(element.to(tl.uint32) ^ low) + _mix(high + low))
    return (bits >> 8).to(tl.int32) >= limit


@triton.jit
def forward_kernel(
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
    limit,
    factor,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute out = norm(total) with total = x + dropout(change), and the statistics of each row."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, PADDED)[None, :]
    there = (row < rows) & (column < WIDTH)
    place = row.to(tl.int64) * WIDTH + column
    added = tl.load(change + place, mask=there, other=0.0).to(tl.float32)
    kept = _kept(tl.load(seed), place, limit)
    both = tl.load(x + place, mask=there, other=0.0).to(tl.float32) + tl.where(kept, added * factor, 0.0)
    both = both.to(total.dtype.element_ty)
    tl.store(total + place, both, mask=there)
    both = both.to(tl.float32)  # rounded to the value that the backward pass reads
    mean = tl.sum(both, axis=1)[:, None] / WIDTH
    centred = tl.where(there, both - mean, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, axis=1)[:, None] / WIDTH + eps)
    w = tl.load(weight + column, mask=column < WIDTH, other=0.0)
    b = tl.load(bias + column, mask=column < WIDTH, other=0.0)
    tl.store(out + place, (centred * scale * w + b).to(out.dtype.element_ty), mask=there)
    tl.store(means + row, mean, mask=row < rows)
    tl.store(scales + row, scale, mask=row < rows)


@triton.jit
def backward_kernel(
    grad,
    total,
    weight,
    seed,
    means,
    scales,
    of_x,
    of_change,
    parts,
    rows,
    limit,
    factor,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute gradients of x and change, and of weight and bias summed over a program's rows, [programs, 2, WIDTH]."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, PADDED)[None, :]
    w = tl.load(weight + column, mask=column < WIDTH, other=0.0)
    to_weight = tl.zeros([ROWS, PADDED], dtype=tl.float32)
    to_bias = tl.zeros([ROWS, PADDED], dtype=tl.float32)
    drawn = tl.load(seed)
    for first in range(program * ROWS, rows, programs * ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        there = (row < rows) & (column < WIDTH)
        place = row.to(tl.int64) * WIDTH + column
        g = tl.load(grad + place, mask=there, other=0.0).to(tl.float32)
        both = tl.load(total + place, mask=there, other=0.0).to(tl.float32)
        mean = tl.load(means + row, mask=row < rows, other=0.0)
        scale = tl.load(scales + row, mask=row < rows, other=0.0)
        unit = tl.where(there, (both - mean) * scale, 0.0)
        to_weight += g * unit
        to_bias += g
        g = g * w
        along = tl.sum(g * unit, axis=1)[:, None] / WIDTH
        g = scale * (g - tl.sum(g, axis=1)[:, None] / WIDTH - unit * along)
        tl.store(of_x + place, g.to(of_x.dtype.element_ty), mask=there)
        kept = _kept(drawn, place, limit)
        tl.store(of_change + place, tl.where(kept, g * factor, 0.0).to(of_change.dtype.element_ty), mask=there)
    into = parts + program * 2 * WIDTH + tl.arange(0, PADDED)
    inside = tl.arange(0, PADDED) < WIDTH
    tl.store(into, tl.sum(to_weight, axis=0), mask=inside)
    tl.store(into + WIDTH, tl.sum(to_bias, axis=0), mask=inside)
