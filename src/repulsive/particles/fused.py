"""The update in three Triton launches: Gram matrices, coefficients, combination. The eager path is the reference.

Every launch covers a whole table of slices. Particles and gradients are read where they lie, whatever their strides;
nothing is stacked, nothing waits for the host. Per update the parameters are read twice, the gradients read and
written once: the four passes that are the floor.

A row of the table describes one slice, in elements: theta's address, its strides over heads, over an outer and over an
inner axis; the same for the gradient; the inner axis' length; numbers per head; the strides of the logical element
index over outer and inner; the group; the stream of the noise.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

THETA, GRAD = 0, 4  # first columns; then 8: inner length, 9: size, 10-11: element strides, 12: group, 13: stream
PAPER, RELEASED, FIXED = 0, 1, 2
RBF, IMQ = 0, 1

_GOLDEN = tl.constexpr(-7046029254386353131)
_MIX_1 = tl.constexpr(-4658895280553007687)
_MIX_2 = tl.constexpr(-7723592293110705685)


@triton.jit
def _offsets(row, start, outer_column: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr):
    """Logical columns start ... start + BLOCK of one slice, and where they lie from the start of a head."""
    column = tl.multiple_of(start, BLOCK) + tl.arange(0, BLOCK)
    if FLAT:  # a head is one run of numbers
        return column, column.to(tl.int64)
    inner = tl.load(row + 8)
    outer_stride = tl.load(row + outer_column)
    inner_stride = tl.load(row + outer_column + 1)
    return column, (column // inner) * outer_stride + (column % inner) * inner_stride


@triton.jit
def _base(row, column: tl.constexpr, kind: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(row + column).to(tl.pointer_type(kind))
    stride = tl.load(row + column + 1)
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
        stride = tl.multiple_of(stride, 16)
    return pointer, stride


@triton.jit
def _size(row, ALIGNED: tl.constexpr):
    size = tl.load(row + 9).to(tl.int32)
    return tl.multiple_of(size, 16) if ALIGNED else size


@triton.jit
def gram_kernel(
    table, products, to_mean, mean2,
    SOURCE: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr, KIND: tl.constexpr, FLAT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Partial Gram matrices of centred heads [slices, SPLITS, MP, MP], their products with the mean, its square."""
    piece, split = tl.program_id(0), tl.program_id(1)
    row = table + piece * COLUMNS
    size = _size(row, ALIGNED)
    base, head_stride = _base(row, SOURCE, KIND, ALIGNED)
    heads = tl.arange(0, MP)
    length = tl.cdiv(tl.cdiv(size, SPLITS), BLOCK) * BLOCK
    first = split * length
    last = tl.minimum(first + length, size)
    if ALIGNED:
        last = tl.multiple_of(last, 16)
    wide: tl.constexpr = MP >= 16
    if wide:
        total = tl.zeros([MP, MP], dtype=tl.float32)
    else:
        total = tl.zeros([MP, MP, BLOCK], dtype=tl.float32)
    with_mean = tl.zeros([MP, BLOCK], dtype=tl.float32)
    of_mean = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(first, last, BLOCK):
        column, offset = _offsets(row, start, SOURCE + 2, BLOCK, FLAT)
        inside = (heads[:, None] < M) & (column[None, :] < last)
        x = tl.load(base + heads[:, None] * head_stride + offset[None, :], mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(x, axis=0) / M
        centred = tl.where(inside, x - mean[None, :], 0.0)
        if wide:
            total += tl.dot(centred, tl.trans(centred), input_precision="ieee")
        else:
            total += centred[:, None, :] * centred[None, :, :]
        with_mean += centred * mean[None, :]
        of_mean += mean * mean
    out = piece * SPLITS + split
    square = heads[:, None] * MP + heads[None, :]
    if wide:
        tl.store(products + out * MP * MP + square, total)
    else:
        tl.store(products + out * MP * MP + square, tl.sum(total, axis=2))
    tl.store(to_mean + out * MP + heads, tl.sum(with_mean, axis=1))
    tl.store(mean2 + out, tl.sum(of_mean, axis=0))


@triton.jit
def _order_statistic(bits, counted, rank):
    """The value (as bits) with exactly `rank` counted values below it: bisection, no sorting, no host."""
    low, high = 0, 0x7FFFFFFF
    for _ in range(31):
        middle = low + (high - low) // 2
        below = tl.sum(tl.sum(((bits <= middle) & counted).to(tl.int32), axis=1), axis=0)
        enough = below > rank
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return low.to(tl.float32, bitcast=True)


@triton.jit
def solve_kernel(
    products, to_mean, mean2, starts, settings, drive, force, row_sums,
    M: tl.constexpr, MP: tl.constexpr, SPLITS: tl.constexpr,
    BANDWIDTH: tl.constexpr, PROFILE: tl.constexpr, SPHERE: tl.constexpr,
):  # fmt: skip
    """A, B [groups, MP, MP] and the row sums of B [groups, MP] from the partial products."""
    group = tl.program_id(0)
    stepsize, alpha, own = tl.load(settings), tl.load(settings + 1), tl.load(settings + 2)
    smoothing, precision, fixed = tl.load(settings + 3), tl.load(settings + 4), tl.load(settings + 5)
    floor2, log_heads = tl.load(settings + 6), tl.load(settings + 7)
    i, j = tl.arange(0, MP)[:, None], tl.arange(0, MP)[None, :]
    split = tl.arange(0, SPLITS)
    gram = tl.zeros([MP, MP], dtype=tl.float64)
    cross = tl.zeros([MP], dtype=tl.float64)
    square = tl.sum(tl.zeros([2], dtype=tl.float64), axis=0)
    for piece in range(tl.load(starts + group), tl.load(starts + group + 1)):
        part = products + (piece * SPLITS + split[:, None, None]) * MP * MP + (i * MP + j)[None, :, :]
        gram += tl.sum(tl.load(part).to(tl.float64), axis=0)
        part = to_mean + (piece * SPLITS + split[:, None]) * MP + tl.arange(0, MP)[None, :]
        cross += tl.sum(tl.load(part).to(tl.float64), axis=0)
        square += tl.sum(tl.load(mean2 + piece * SPLITS + split).to(tl.float64), axis=0)
    valid = (i < M) & (j < M)
    eye = i == j
    own_i = tl.sum(tl.where(eye, gram, 0.0), axis=1)
    d2 = own_i[:, None] + own_i[None, :] - 2 * gram
    d2 = tl.where(eye | (d2 < 0), 0.0, d2)
    norms2 = own_i + 2 * cross + square
    scale2 = tl.sum(tl.where(tl.arange(0, MP) < M, norms2, 0.0), axis=0) / M
    norms = tl.sqrt(tl.where(norms2 > 0, norms2, 1.0))
    outer = norms[:, None] * norms[None, :]
    if SPHERE:
        apart = norms[:, None] - norms[None, :]
        d2 = (d2 - apart * apart) / outer
        d2 = tl.where(eye | (d2 < 0), 0.0, d2)
        scale2 = scale2 * 0 + 1
    if BANDWIDTH == 2:
        h = scale2 * 0 + fixed
    elif M == 1:
        h = scale2 * 0 + 1
    else:
        bits = d2.to(tl.float32).to(tl.int32, bitcast=True)
        if BANDWIDTH == 0:
            count: tl.constexpr = M * (M - 1) // 2
            counted = valid & (i < j)
            low = tl.sqrt(_order_statistic(bits, counted, (count - 1) // 2).to(tl.float64))
            high = tl.sqrt(_order_statistic(bits, counted, count // 2).to(tl.float64))
            h = (low + high) * (low + high) / 4 / log_heads
        else:
            every: tl.constexpr = M * M
            low = _order_statistic(bits, valid, (every - 1) // 2).to(tl.float64)
            high = _order_statistic(bits, valid, every // 2).to(tl.float64)
            h = (low + high) / 2 / log_heads
        h = tl.maximum(h, floor2 * scale2)
    safe = tl.where(h == 0, 1.0, h)  # every head is zero: they are equal, and no force acts
    acts = tl.where(h == 0, 0.0, 1.0)
    ratio = d2 / safe
    if PROFILE == 0:
        kernel = tl.exp(-ratio)
        slope = kernel
    else:
        kernel = 1 / tl.sqrt(1 + ratio)
        slope = 0.5 * kernel / (1 + ratio)
    weight = tl.where(valid & (i != j), acts * slope / safe, 0.0)
    if SPHERE:
        own_force = tl.sum(2 * weight * (1 - d2 / 2), axis=1) / (norms * norms)
        repulsion = tl.where(eye, own_force[:, None], -2 * weight / outer)
    else:
        repulsion = 2 * tl.where(eye, tl.sum(weight, axis=1)[:, None], -weight)
    unit = eye.to(tl.float64)
    a = stepsize * ((smoothing * kernel + (1 - smoothing) * unit) / M + own * unit)
    b = precision * a - alpha * stepsize / M * repulsion
    a, b = tl.where(valid, a, 0.0), tl.where(valid, b, 0.0)
    place = group * MP * MP + i * MP + j
    tl.store(drive + place, a.to(tl.float32))
    tl.store(force + place, b.to(tl.float32))
    tl.store(row_sums + group * MP + tl.arange(0, MP), tl.sum(b, axis=1).to(tl.float32))


@triton.jit
def _mix(bits):
    bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * _MIX_1
    bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return bits ^ ((bits >> 31) & 0x1FFFFFFFF)


@triton.jit
def _normal(stream, step, element):
    key = _mix(stream + (step + 1) * _GOLDEN)
    bits = _mix(element * _GOLDEN + key)
    first = (((bits >> 32) & 0xFFFFFFFF).to(tl.float32) + 1) * 2.3283064365386963e-10
    second = (bits & 0xFFFFFFFF).to(tl.float32) * 2.3283064365386963e-10
    return tl.sqrt(-2 * tl.log(first)) * tl.cos(6.283185307179586 * second)


@triton.jit
def combine_kernel(
    table, drive, force, row_sums, scale, sigmas, steps,
    M: tl.constexpr, MP: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
    T_KIND: tl.constexpr, G_KIND: tl.constexpr, FLAT: tl.constexpr, ALIGNED: tl.constexpr,
    SCALED: tl.constexpr, NOISE: tl.constexpr,
):  # fmt: skip
    """grad <- A grad + B theta + sigma xi, in place."""
    piece, split = tl.program_id(0), tl.program_id(1)
    row = table + piece * COLUMNS
    size = _size(row, ALIGNED)
    group = tl.load(row + 12)
    theta, theta_stride = _base(row, 0, T_KIND, ALIGNED)
    grad, grad_stride = _base(row, 4, G_KIND, ALIGNED)
    heads = tl.arange(0, MP)
    length = tl.cdiv(tl.cdiv(size, SPLITS), BLOCK) * BLOCK
    first = split * length
    last = tl.minimum(first + length, size)
    if ALIGNED:
        last = tl.multiple_of(last, 16)
    sums = tl.load(row_sums + group * MP + heads)
    matrix = group * MP * MP + heads[:, None] * MP + heads[None, :]
    factor = 1.0
    if SCALED:
        factor = tl.load(scale).to(tl.float32)
    for start in range(first, last, BLOCK):
        column, grad_offset = _offsets(row, start, 6, BLOCK, FLAT)
        _, theta_offset = _offsets(row, start, 2, BLOCK, FLAT)
        there = column < last
        if MP >= 16:  # matrix units are of no use in full float32, but unrolled loops would be too long
            inside = (heads[:, None] < M) & there[None, :]
            g = tl.load(grad + heads[:, None] * grad_stride + grad_offset[None, :], mask=inside, other=0.0)
            out = tl.dot(tl.load(drive + matrix), g.to(tl.float32), input_precision="ieee")
            t = tl.load(theta + heads[:, None] * theta_stride + theta_offset[None, :], mask=inside, other=0.0)
            t = t.to(tl.float32)
            mean = tl.sum(t, axis=0) / M
            t = tl.where(inside, t - mean[None, :], 0.0)
            push = tl.dot(tl.load(force + matrix), t, input_precision="ieee") + sums[:, None] * mean[None, :]
        else:
            out = tl.zeros([MP, BLOCK], dtype=tl.float32)
            mean = tl.zeros([BLOCK], dtype=tl.float32)
            for k in tl.static_range(M):
                g = tl.load(grad + k * grad_stride + grad_offset, mask=there, other=0.0).to(tl.float32)
                out += tl.load(drive + group * MP * MP + heads * MP + k)[:, None] * g[None, :]
                mean += tl.load(theta + k * theta_stride + theta_offset, mask=there, other=0.0).to(tl.float32)
            mean = mean / M
            push = sums[:, None] * mean[None, :]
            for k in tl.static_range(M):
                t = tl.load(theta + k * theta_stride + theta_offset, mask=there, other=0.0).to(tl.float32) - mean
                push += tl.load(force + group * MP * MP + heads * MP + k)[:, None] * t[None, :]
        out += push * factor
        if NOISE:
            if FLAT:
                logical = column.to(tl.int64)
            else:
                inner = tl.load(row + 8)
                logical = (column // inner) * tl.load(row + 10) + (column % inner) * tl.load(row + 11)
            element = heads[:, None].to(tl.int64) * size + logical[None, :]
            noise = _normal(tl.load(row + 13), tl.load(steps), element)
            out += noise * tl.load(sigmas + piece) * factor
        inside = (heads[:, None] < M) & there[None, :]
        tl.store(grad + heads[:, None] * grad_stride + grad_offset[None, :], out.to(G_KIND), mask=inside)
