"""Triton functions of both pairs of LSTM kernels: positions, loads and stores, and the equations of a cell."""

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
def program_rows(ends, B, T, ROWS: tl.constexpr):
    """Return direction and sentences of this program, their starts and ends, and a mask of existing sentences."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    end = tl.load(ends + rows, mask=rows < B, other=0).to(tl.int32)
    return tl.program_id(1), rows, rows.to(tl.int64) * T, end, rows < B


@triton.jit
def row_of_word(begin, end, way, t):
    """Return the row of [B, T, 2] that holds word t in reading order."""
    return (begin + tl.where((way == 1) & (t < end), end - 1 - t, t)) * 2 + way


@triton.jit
def columns(first, COUNT: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr):
    """Return the columns of WIDTH units, from `first` on, in each of COUNT blocks of P columns."""
    wide = tl.arange(0, COUNT * WIDTH)
    return wide // WIDTH * P + first + wide % WIDTH


@triton.jit
def _split_four(wide, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Split [ROWS, 4 WIDTH] into four [ROWS, WIDTH]. With 64 units and 8 warps no value moves between threads."""
    pairs = tl.reshape(tl.permute(tl.reshape(wide, [ROWS, 4, WIDTH]), (0, 2, 1)), [ROWS, WIDTH, 2, 2])
    even, odd = tl.split(pairs)
    i, g = tl.split(even)
    f, o = tl.split(odd)
    return i, f, g, o


@triton.jit
def split_two(wide, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Split [ROWS, 2 WIDTH] into two [ROWS, WIDTH] of float32."""
    return tl.split(tl.permute(tl.reshape(wide.to(tl.float32), [ROWS, 2, WIDTH]), (0, 2, 1)))


@triton.jit
def _join_four(i, f, g, o, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    four = tl.reshape(tl.join(tl.join(i, g), tl.join(f, o)), [ROWS, WIDTH, 4])
    return tl.reshape(tl.permute(four, (0, 2, 1)), [ROWS, 4 * WIDTH])


@triton.jit
def _join_two(a, b, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), [ROWS, 2 * WIDTH])


@triton.jit
def cell_forward(z, c, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Compute the new state and cell, the slopes of the gates, and the factors `open` and f of `links`."""
    i, f, g, o = _split_four(z, ROWS, WIDTH)
    i, f, g, o = _sigmoid(i), _sigmoid(f), _tanh(g), _sigmoid(o)
    new = f * c + i * g
    level = _tanh(new)
    slopes = _join_four(g * i * (1 - i), c * f * (1 - f), i * (1 - g * g), level * o * (1 - o), ROWS, WIDTH)
    return o * level, new, slopes, _join_two(o * (1 - level * level), f, ROWS, WIDTH)


@triton.jit
def cell_backward(slopes, dh, dc, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Compute the gradients of the gate inputs."""
    i, f, g, o = _split_four(slopes.to(tl.float32), ROWS, WIDTH)
    return _join_four(dc * i, dc * f, dc * g, dh * o, ROWS, WIDTH)


@triton.jit
def row_maximum(dh, dc):
    """Compute the maximum of each row, to scale gradients; the gradient of f may exceed it by a factor cell / 4."""
    return tl.max(tl.maximum(tl.abs(dh), tl.abs(dc)), axis=1)


@triton.jit
def divisor(peak):
    """Compute the divisor that scales the maximum of a row to 1; 1 for rows whose inverse would be infinite."""
    return tl.where(peak > 1e-30, peak, 1.0)


@triton.jit
def load_blocks(source, at, there, first, COUNT: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr):
    """Load WIDTH units of each of COUNT blocks of P columns, from the rows `at`; zeros where `there` is False."""
    here = source + at[:, None] * (COUNT * P) + columns(first, COUNT, WIDTH, P)[None, :]
    return tl.load(here, mask=there[:, None], other=0.0)


@triton.jit
def store_blocks(target, value, at, there, first, COUNT: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr):
    """Store what `load_blocks` loads."""
    here = target + at[:, None] * (COUNT * P) + columns(first, COUNT, WIDTH, P)[None, :]
    tl.store(here, value.to(target.dtype.element_ty), mask=there[:, None])


@triton.jit
def load_units(source, at, there, first, WIDTH: tl.constexpr, H: tl.constexpr):
    """Load WIDTH of the H units of the rows `at`; zeros where `there` is False, and for padded units."""
    unit = first + tl.arange(0, WIDTH)
    inside = there[:, None] & (unit < H)[None, :]
    return tl.load(source + at[:, None] * H + unit[None, :], mask=inside, other=0.0)


@triton.jit
def store_units(target, value, at, there, first, WIDTH: tl.constexpr, H: tl.constexpr):
    """Store what `load_units` loads."""
    unit = first + tl.arange(0, WIDTH)
    inside = there[:, None] & (unit < H)[None, :]
    tl.store(target + at[:, None] * H + unit[None, :], value.to(target.dtype.element_ty), mask=inside)
