"""LSTM kernels that keep weights in shared memory and states in registers for the whole sentence."""

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


@triton.constexpr_function
def _width(piece, P):
    """Return the width of a block of held weights: 64 units, or 32 for the last block if P is an odd multiple of 32."""
    return 64 if (piece + 1) * 64 <= P else 32


@triton.jit
def _load_all(source, at, there, COUNT: tl.constexpr, PIECES: tl.constexpr, P: tl.constexpr):
    read = ()
    for n in tl.static_range(PIECES):
        read = read + (load_blocks(source, at, there, n * 64, COUNT, _width(n, P), P),)  # noqa: RUF005
    return read


@triton.jit
def _load_all_back(gates, links, dstates, at, there, PIECES: tl.constexpr, H: tl.constexpr, P: tl.constexpr):
    given = ()
    for n in tl.static_range(PIECES):
        given = given + (load_units(dstates, at, there, n * 64, _width(n, P), H),)  # noqa: RUF005
    return _load_all(gates, at, there, 4, PIECES, P), _load_all(links, at, there, 2, PIECES, P), given


@triton.jit
def _zeros(kind: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr, P: tl.constexpr):
    made = ()
    for n in tl.static_range(PIECES):
        made = made + (tl.zeros([ROWS, _width(n, P)], dtype=kind),)  # noqa: RUF005
    return made


@triton.jit(do_not_specialize=["B", "T"])
def held_forward(
    gates,
    weights,
    ends,
    states,
    before,
    links,
    B,
    T,
    H: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    SAVE: tl.constexpr,
):
    """Compute the same as `streamed_forward` with held weights; gate inputs are prefetched one word ahead."""
    way, rows, begin, end, there = program_rows(ends, B, T, ROWS)
    PIECES: tl.constexpr = (P + 63) // 64
    weights += way * 4 * P * P
    w = ()
    for n in tl.static_range(PIECES):
        for k in tl.static_range(PIECES):
            column, inner = columns(n * 64, 4, _width(n, P), P), k * 64 + tl.arange(0, _width(k, P))
            w = w + (tl.load(weights + column[None, :] * P + inner[:, None]),)  # noqa: RUF005
    h, c = _zeros(KIND, ROWS, PIECES, P), _zeros(tl.float32, ROWS, PIECES, P)
    at = row_of_word(begin, end, way, 0)
    if SAVE:
        for n in tl.static_range(PIECES):
            store_units(before, h[n], at, there, n * 64, _width(n, P), H)
    x = _load_all(gates, at, there, 4, PIECES, P)
    for t in tl.range(0, T, num_stages=1):
        after, more = row_of_word(begin, end, way, t + 1), rows < tl.where(t + 1 < T, B, 0)
        ahead = _load_all(gates, after, more, 4, PIECES, P)
        new_h, new_c = (), ()
        for n in tl.static_range(PIECES):
            z = x[n].to(tl.float32)
            for k in tl.static_range(PIECES):
                z = tl.dot(h[k], w[n * PIECES + k], z)
            state, cell, slopes, link = cell_forward(z, c[n], ROWS, _width(n, P))
            store_units(states, state, at, there, n * 64, _width(n, P), H)
            if SAVE:
                store_units(before, state, after, more, n * 64, _width(n, P), H)
                store_blocks(gates, slopes, at, there, n * 64, 4, _width(n, P), P)
                store_blocks(links, link, at, there, n * 64, 2, _width(n, P), P)
            new_h, new_c = new_h + (state.to(KIND),), new_c + (cell,)  # noqa: RUF005
        h, c, x, at = new_h, new_c, ahead, after


@triton.jit(do_not_specialize=["B", "T"])
def held_backward(
    gates,
    weights,
    ends,
    links,
    dstates,
    dgates,
    B,
    T,
    H: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
):
    """Compute the same as `streamed_backward` with held weights, without the buffer in global memory."""
    way, rows, begin, end, there = program_rows(ends, B, T, ROWS)
    PIECES: tl.constexpr = (P + 63) // 64
    weights += way * 4 * P * P
    w = ()
    for n in tl.static_range(PIECES):
        for k in tl.static_range(PIECES):
            column, unit = columns(k * 64, 4, _width(k, P), P), n * 64 + tl.arange(0, _width(n, P))
            w = w + (tl.load(weights + column[:, None] * P + unit[None, :]),)  # noqa: RUF005
    dh, dc = _zeros(tl.float32, ROWS, PIECES, P), _zeros(tl.float32, ROWS, PIECES, P)
    at = row_of_word(begin, end, way, T - 1)
    slopes, link, given = _load_all_back(gates, links, dstates, at, there, PIECES, H, P)
    for step in tl.range(0, T, num_stages=1):
        after, more = row_of_word(begin, end, way, T - 2 - step), rows < tl.where(step + 1 < T, B, 0)
        ahead = _load_all_back(gates, links, dstates, after, more, PIECES, H, P)
        dz, peaks, new_dc = (), (), ()
        for n in tl.static_range(PIECES):
            opened, forget = split_two(link[n], ROWS, _width(n, P))
            dstate = dh[n] + given[n].to(tl.float32)
            dcell = dc[n] + dstate * opened
            d = cell_backward(slopes[n], dstate, dcell, ROWS, _width(n, P))
            store_blocks(dgates, d, at, there, n * 64, 4, _width(n, P), P)
            if KIND is tl.float16:  # scale gradients into the range of half precision
                peak = divisor(row_maximum(dstate, dcell))
                d = cell_backward(slopes[n], dstate / peak[:, None], dcell / peak[:, None], ROWS, _width(n, P))
                peaks = peaks + (peak,)  # noqa: RUF005
            dz, new_dc = dz + (d.to(KIND),), new_dc + (dcell * forget,)  # noqa: RUF005
        new_dh = _zeros(tl.float32, ROWS, PIECES, P)
        for k in tl.static_range(PIECES):
            partial = ()
            for n in tl.static_range(PIECES):
                if KIND is tl.float16:
                    total = new_dh[n] + tl.dot(dz[k], w[n * PIECES + k]) * peaks[k][:, None]
                else:
                    total = tl.dot(dz[k], w[n * PIECES + k], new_dh[n])
                partial = partial + (total,)  # noqa: RUF005
            new_dh = partial
        dh, dc, at = new_dh, new_dc, after
        slopes, link, given = ahead
