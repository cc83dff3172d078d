"""A bidirectional LSTM over whole sentences: one Triton launch forward and one backward.

A program processes ROWS sentences in one direction, word by word, so programs never synchronise. Direction 0 reads
positions 0, 1, 2, ...; direction 1 reads each sentence from its last word to its first, then the padding. Tensors are
indexed by position in the sentence, [B, T, 2, ...], so nothing is reversed in memory. Units are padded to P, a multiple
of 32; padded units have zero weights and stay exactly zero in both passes.

The forward pass also computes the factors of the backward pass:

    dc += dh * open                                                 open = o (1 - tanh^2 c)
    di, df, dg, do = dc * slope_i, dc * slope_f, dc * slope_g, dh * slope_o
    dc *= f

`gates` [B, T, 2, 4P] holds the inputs of the gates i, f, g, o, and is overwritten by their slopes. `links`
[B, T, 2, 2P] holds open and f.

There are two pairs of Triton kernels. `held` keeps weights in shared memory and states in registers for the whole
sentence. `streamed` supports any size: weights are read again at every word, and states go through global memory, with
a barrier. Loops that read what they wrote have one pipeline stage: deeper ones would read it too early.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _tanh(x):
    return 2 / (1 + tl.exp(-2 * x)) - 1


@triton.jit
def _reading(ends, B, T, ROWS: tl.constexpr):
    """Return direction and sentences of this program, their starts and ends, and a mask of existing sentences."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    end = tl.load(ends + rows, mask=rows < B, other=0).to(tl.int32)
    return tl.program_id(1), rows, rows.to(tl.int64) * T, end, rows < B


@triton.jit
def _place(begin, end, way, t):
    """Return the row of [B, T, 2] that holds word t in reading order."""
    return (begin + tl.where((way == 1) & (t < end), end - 1 - t, t)) * 2 + way


@triton.jit
def _columns(first, COUNT: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr):
    """Return the columns of WIDTH units, from `first` on, in each of COUNT blocks of P columns."""
    wide = tl.arange(0, COUNT * WIDTH)
    return wide // WIDTH * P + first + wide % WIDTH


@triton.jit
def _four(wide, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Split [ROWS, 4 WIDTH] into four [ROWS, WIDTH]. With 64 units and 8 warps no value moves between threads."""
    pairs = tl.reshape(tl.permute(tl.reshape(wide, [ROWS, 4, WIDTH]), (0, 2, 1)), [ROWS, WIDTH, 2, 2])
    even, odd = tl.split(pairs)
    i, g = tl.split(even)
    f, o = tl.split(odd)
    return i, f, g, o


@triton.jit
def _two(wide, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(wide.to(tl.float32), [ROWS, 2, WIDTH]), (0, 2, 1)))


@triton.jit
def _join_four(i, f, g, o, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    four = tl.reshape(tl.join(tl.join(i, g), tl.join(f, o)), [ROWS, WIDTH, 4])
    return tl.reshape(tl.permute(four, (0, 2, 1)), [ROWS, 4 * WIDTH])


@triton.jit
def _join_two(a, b, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), [ROWS, 2 * WIDTH])


@triton.jit
def _cell(z, c, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Compute the new state and cell, the slopes of the gates, and the factors `open` and f of `links`."""
    i, f, g, o = _four(z, ROWS, WIDTH)
    i, f, g, o = _sigmoid(i), _sigmoid(f), _tanh(g), _sigmoid(o)
    new = f * c + i * g
    level = _tanh(new)
    slopes = _join_four(g * i * (1 - i), c * f * (1 - f), i * (1 - g * g), level * o * (1 - o), ROWS, WIDTH)
    return o * level, new, slopes, _join_two(o * (1 - level * level), f, ROWS, WIDTH)


@triton.jit
def _cell_back(slopes, dh, dc, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Compute the gradients of the gate inputs."""
    i, f, g, o = _four(slopes.to(tl.float32), ROWS, WIDTH)
    return _join_four(dc * i, dc * f, dc * g, dh * o, ROWS, WIDTH)


@triton.jit
def _peak(dh, dc):
    """Compute the maximum of each row, to scale gradients; the gradient of f may exceed it by a factor cell / 4."""
    return tl.max(tl.maximum(tl.abs(dh), tl.abs(dc)), axis=1)


@triton.jit
def _divisor(peak):
    """Compute the divisor that scales the maximum of a row to 1; 1 for rows whose inverse would be infinite."""
    return tl.where(peak > 1e-30, peak, 1.0)


@triton.jit
def _get(source, at, there, first, COUNT: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr):
    here = source + at[:, None] * (COUNT * P) + _columns(first, COUNT, WIDTH, P)[None, :]
    return tl.load(here, mask=there[:, None], other=0.0)


@triton.jit
def _put(target, value, at, there, first, COUNT: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr):
    here = target + at[:, None] * (COUNT * P) + _columns(first, COUNT, WIDTH, P)[None, :]
    tl.store(here, value.to(target.dtype.element_ty), mask=there[:, None])


@triton.jit
def _get_units(source, at, there, first, WIDTH: tl.constexpr, H: tl.constexpr):
    unit = first + tl.arange(0, WIDTH)
    inside = there[:, None] & (unit < H)[None, :]
    return tl.load(source + at[:, None] * H + unit[None, :], mask=inside, other=0.0)


@triton.jit
def _put_units(target, value, at, there, first, WIDTH: tl.constexpr, H: tl.constexpr):
    unit = first + tl.arange(0, WIDTH)
    inside = there[:, None] & (unit < H)[None, :]
    tl.store(target + at[:, None] * H + unit[None, :], value.to(target.dtype.element_ty), mask=inside)


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
    way, rows, begin, end, there = _reading(ends, B, T, ROWS)
    inner = tl.arange(0, DEPTH)
    weights += way * 4 * P * P
    own, size = (way * B + rows).to(tl.int64), B.to(tl.int64) * 2
    for first in tl.range(0, P, WIDTH, num_stages=1):
        _put_units(before, tl.zeros([ROWS, WIDTH], tl.float32), _place(begin, end, way, 0), there, first, WIDTH, H)
    tl.debug_barrier()
    for t in tl.range(0, T, num_stages=1):
        at, after = _place(begin, end, way, t), _place(begin, end, way, t + 1)
        begun, more = rows < tl.where(t > 0, B, 0), rows < tl.where(t + 1 < T, B, 0)
        for first in tl.range(0, P, WIDTH, num_stages=1):
            x = _get(gates, at, there, first, 4, WIDTH, P)
            c = _get(carried, own + (t + 1) % 2 * size, begun, first, 1, WIDTH, P)
            column = _columns(first, 4, WIDTH, P)
            z = tl.zeros([ROWS, 4 * WIDTH], dtype=tl.float32)
            for k in tl.range(0, P, DEPTH, num_stages=STAGES):
                inside = there[:, None] & (k + inner < H)[None, :]
                h = tl.load(before + at[:, None] * H + (k + inner)[None, :], mask=inside, other=0.0)
                w = tl.load(weights + column[None, :] * P + (k + inner)[:, None])
                z = tl.dot(h.to(KIND), w, z, input_precision=PRECISION)
            state, c, slopes, link = _cell(z + x.to(tl.float32), c, ROWS, WIDTH)
            _put_units(states, state, at, there, first, WIDTH, H)
            _put_units(before, state, after, more, first, WIDTH, H)
            _put(carried, c, own + t % 2 * size, there, first, 1, WIDTH, P)
            if SAVE:
                _put(gates, slopes, at, there, first, 4, WIDTH, P)
                _put(links, link, at, there, first, 2, WIDTH, P)
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
    way, rows, begin, end, there = _reading(ends, B, T, ROWS)
    inner, span = tl.arange(0, DEPTH), tl.arange(0, WIDTH)
    weights += way * 4 * P * P
    own, size = (way * B + rows).to(tl.int64), B.to(tl.int64) * 2
    for step in tl.range(0, T, num_stages=1):
        at = _place(begin, end, way, T - 1 - step)
        begun = rows < tl.where(step > 0, B, 0)
        peak = tl.zeros([ROWS], dtype=tl.float32)
        for first in tl.range(0, P, WIDTH, num_stages=1):
            slopes, link = _get(gates, at, there, first, 4, WIDTH, P), _get(links, at, there, first, 2, WIDTH, P)
            dh = _get_units(dstates, at, there, first, WIDTH, H).to(tl.float32)
            dh += _get(carried, own + 2 * size, begun, first, 1, WIDTH, P)
            dc = _get(carried, own + (step + 1) % 2 * size, begun, first, 1, WIDTH, P)
            opened, forget = _two(link, ROWS, WIDTH)
            dc += dh * opened
            _put(dgates, _cell_back(slopes, dh, dc, ROWS, WIDTH), at, there, first, 4, WIDTH, P)
            _put(carried, dc * forget, own + step % 2 * size, there, first, 1, WIDTH, P)
            if KIND is tl.float16:
                peak = tl.maximum(peak, _peak(dh, dc))
        tl.debug_barrier()
        peak = _divisor(peak)
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
            _put(carried, dh, own + 2 * size, there, first, 1, WIDTH, P)
        tl.debug_barrier()


@triton.constexpr_function
def _width(piece, P):
    """Return the width of a block of held weights: 64 units, or 32 for the last block if P is an odd multiple of 32."""
    return 64 if (piece + 1) * 64 <= P else 32


@triton.jit
def _get_all(source, at, there, COUNT: tl.constexpr, PIECES: tl.constexpr, P: tl.constexpr):
    read = ()
    for n in tl.static_range(PIECES):
        read = read + (_get(source, at, there, n * 64, COUNT, _width(n, P), P),)  # noqa: RUF005
    return read


@triton.jit
def _get_all_back(gates, links, dstates, at, there, PIECES: tl.constexpr, H: tl.constexpr, P: tl.constexpr):
    given = ()
    for n in tl.static_range(PIECES):
        given = given + (_get_units(dstates, at, there, n * 64, _width(n, P), H),)  # noqa: RUF005
    return _get_all(gates, at, there, 4, PIECES, P), _get_all(links, at, there, 2, PIECES, P), given


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
    way, rows, begin, end, there = _reading(ends, B, T, ROWS)
    PIECES: tl.constexpr = (P + 63) // 64
    weights += way * 4 * P * P
    w = ()
    for n in tl.static_range(PIECES):
        for k in tl.static_range(PIECES):
            column, inner = _columns(n * 64, 4, _width(n, P), P), k * 64 + tl.arange(0, _width(k, P))
            w = w + (tl.load(weights + column[None, :] * P + inner[:, None]),)  # noqa: RUF005
    h, c = _zeros(KIND, ROWS, PIECES, P), _zeros(tl.float32, ROWS, PIECES, P)
    at = _place(begin, end, way, 0)
    if SAVE:
        for n in tl.static_range(PIECES):
            _put_units(before, h[n], at, there, n * 64, _width(n, P), H)
    x = _get_all(gates, at, there, 4, PIECES, P)
    for t in tl.range(0, T, num_stages=1):
        after, more = _place(begin, end, way, t + 1), rows < tl.where(t + 1 < T, B, 0)
        ahead = _get_all(gates, after, more, 4, PIECES, P)
        new_h, new_c = (), ()
        for n in tl.static_range(PIECES):
            z = x[n].to(tl.float32)
            for k in tl.static_range(PIECES):
                z = tl.dot(h[k], w[n * PIECES + k], z)
            state, cell, slopes, link = _cell(z, c[n], ROWS, _width(n, P))
            _put_units(states, state, at, there, n * 64, _width(n, P), H)
            if SAVE:
                _put_units(before, state, after, more, n * 64, _width(n, P), H)
                _put(gates, slopes, at, there, n * 64, 4, _width(n, P), P)
                _put(links, link, at, there, n * 64, 2, _width(n, P), P)
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
    way, rows, begin, end, there = _reading(ends, B, T, ROWS)
    PIECES: tl.constexpr = (P + 63) // 64
    weights += way * 4 * P * P
    w = ()
    for n in tl.static_range(PIECES):
        for k in tl.static_range(PIECES):
            column, unit = _columns(k * 64, 4, _width(k, P), P), n * 64 + tl.arange(0, _width(n, P))
            w = w + (tl.load(weights + column[:, None] * P + unit[None, :]),)  # noqa: RUF005
    dh, dc = _zeros(tl.float32, ROWS, PIECES, P), _zeros(tl.float32, ROWS, PIECES, P)
    at = _place(begin, end, way, T - 1)
    slopes, link, given = _get_all_back(gates, links, dstates, at, there, PIECES, H, P)
    for step in tl.range(0, T, num_stages=1):
        after, more = _place(begin, end, way, T - 2 - step), rows < tl.where(step + 1 < T, B, 0)
        ahead = _get_all_back(gates, links, dstates, after, more, PIECES, H, P)
        dz, peaks, new_dc = (), (), ()
        for n in tl.static_range(PIECES):
            opened, forget = _two(link[n], ROWS, _width(n, P))
            dstate = dh[n] + given[n].to(tl.float32)
            dcell = dc[n] + dstate * opened
            d = _cell_back(slopes[n], dstate, dcell, ROWS, _width(n, P))
            _put(dgates, d, at, there, n * 64, 4, _width(n, P), P)
            if KIND is tl.float16:  # scale gradients into the range of half precision
                peak = _divisor(_peak(dstate, dcell))
                d = _cell_back(slopes[n], dstate / peak[:, None], dcell / peak[:, None], ROWS, _width(n, P))
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
