"""LSTM kernels for any size: weights are read again at every word, and states go through global memory."""

# mypy: ignore-errors
import triton
import triton.language as tl

from repulsive.lab.layers.lstm_kernels.cell import (
    cell_backward,
    cell_forward,
    columns,
    divisor,
    load_blocks,
    load_units,
    program_rows,
    row_maximum,
    row_of_word,
    split_two,
    store_blocks,
    store_units,
)


@triton.jit(do_not_specialize=["B", "T"])
def streamed_forward(
    gates,
    weights,
    ends,
    states,
    before,
    links,
    carried,
    B,
    T,
    H: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    SAVE: tl.constexpr,
):
    """Compute states [B, T, 2, H], previous states, slopes and links.

    `weights` are [2, 4P, P]; `carried` [2, 2, B, P] is a buffer for the cells of even and of odd words.
    """
    way, rows, begin, end, there = program_rows(ends, B, T, ROWS)
    inner = tl.arange(0, DEPTH)
    weights += way * 4 * P * P
    own, size = (way * B + rows).to(tl.int64), B.to(tl.int64) * 2
    start = row_of_word(begin, end, way, 0)
    for first in tl.range(0, P, WIDTH, num_stages=1):
        store_units(before, tl.zeros([ROWS, WIDTH], tl.float32), start, there, first, WIDTH, H)
    tl.debug_barrier()
    for t in tl.range(0, T, num_stages=1):
        at, after = row_of_word(begin, end, way, t), row_of_word(begin, end, way, t + 1)
        begun, more = rows < tl.where(t > 0, B, 0), rows < tl.where(t + 1 < T, B, 0)
        for first in tl.range(0, P, WIDTH, num_stages=1):
            x = load_blocks(gates, at, there, first, 4, WIDTH, P)
            c = load_blocks(carried, own + (t + 1) % 2 * size, begun, first, 1, WIDTH, P)
            column = columns(first, 4, WIDTH, P)
            z = tl.zeros([ROWS, 4 * WIDTH], dtype=tl.float32)
            for k in tl.range(0, P, DEPTH, num_stages=STAGES):
                inside = there[:, None] & (k + inner < H)[None, :]
                h = tl.load(before + at[:, None] * H + (k + inner)[None, :], mask=inside, other=0.0)
                w = tl.load(weights + column[None, :] * P + (k + inner)[:, None])
                z = tl.dot(h.to(KIND), w, z, input_precision=PRECISION)
            state, c, slopes, link = cell_forward(z + x.to(tl.float32), c, ROWS, WIDTH)
            store_units(states, state, at, there, first, WIDTH, H)
            store_units(before, state, after, more, first, WIDTH, H)
            store_blocks(carried, c, own + t % 2 * size, there, first, 1, WIDTH, P)
            if SAVE:
                store_blocks(gates, slopes, at, there, first, 4, WIDTH, P)
                store_blocks(links, link, at, there, first, 2, WIDTH, P)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["B", "T"])
def streamed_backward(
    gates,
    weights,
    ends,
    links,
    dstates,
    dgates,
    carried,
    B,
    T,
    H: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute gradients of the gate inputs [B, T, 2, 4P]; `carried` [3, 2, B, P] buffers dc (twice) and dh."""
    way, rows, begin, end, there = program_rows(ends, B, T, ROWS)
    inner, span = tl.arange(0, DEPTH), tl.arange(0, WIDTH)
    weights += way * 4 * P * P
    own, size = (way * B + rows).to(tl.int64), B.to(tl.int64) * 2
    for step in tl.range(0, T, num_stages=1):
        at = row_of_word(begin, end, way, T - 1 - step)
        begun = rows < tl.where(step > 0, B, 0)
        peak = tl.zeros([ROWS], dtype=tl.float32)
        for first in tl.range(0, P, WIDTH, num_stages=1):
            slopes = load_blocks(gates, at, there, first, 4, WIDTH, P)
            link = load_blocks(links, at, there, first, 2, WIDTH, P)
            dh = load_units(dstates, at, there, first, WIDTH, H).to(tl.float32)
            dh += load_blocks(carried, own + 2 * size, begun, first, 1, WIDTH, P)
            dc = load_blocks(carried, own + (step + 1) % 2 * size, begun, first, 1, WIDTH, P)
            opened, forget = split_two(link, ROWS, WIDTH)
            dc += dh * opened
            store_blocks(dgates, cell_backward(slopes, dh, dc, ROWS, WIDTH), at, there, first, 4, WIDTH, P)
            store_blocks(carried, dc * forget, own + step % 2 * size, there, first, 1, WIDTH, P)
            if KIND is tl.float16:
                peak = tl.maximum(peak, row_maximum(dh, dc))
        tl.debug_barrier()
        peak = divisor(peak)
        for first in tl.range(0, P, WIDTH, num_stages=1):
            dh = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
            for k in tl.range(0, 4 * P, DEPTH, num_stages=STAGES):
                dz = tl.load(dgates + at[:, None] * 4 * P + (k + inner)[None, :], mask=there[:, None], other=0.0)
                w = tl.load(weights + (k + inner)[:, None] * P + (first + span)[None, :])
                if KIND is tl.float16:  # scale gradients into the range of half precision
                    dz = dz.to(tl.float32) / peak[:, None]
                dh = tl.dot(dz.to(KIND), w, dh, input_precision=PRECISION)
            if KIND is tl.float16:
                dh *= peak[:, None]
            store_blocks(carried, dh, own + 2 * size, there, first, 1, WIDTH, P)
        tl.debug_barrier()
