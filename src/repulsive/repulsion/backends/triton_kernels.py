"""Triton kernels of the fused update: Gram matrices, coefficients, combination. `eager` is the reference.

Every launch covers a whole table of slices. Particles and gradients are read in place, whatever their strides. Nothing
is stacked, and nothing waits for the host. An update reads the parameters twice, and reads and writes the gradients
once: these four passes are the minimum. A rule that holds a ratio, and a measurement, read the gradients once more.

A row of the table describes one slice, in elements. Its columns are:

- 0-2: strides over heads, over an outer and over an inner axis
- 3: length of the inner axis
- 4: elements per head
- 5-6: strides of the logical element index over the outer and the inner axis
- 7: index of the group
- 8: noise stream

Weight and gradient have the same strides; only their addresses [slices, 2] change between steps.

From 16 heads on, matrix products run on tensor cores as three TF32 products each ("tf32x3"): a number is split into its
first 10 bits and its next 10, and only the product of the two small parts is left out. This is as accurate as float32;
TF32 alone is not.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from repulsive.particles.kernels import SHORTEST

# Values of the constants below; inside the Triton kernels they are written as numbers.
PAPER, RELEASED, FIXED, LOWER = 0, 1, 2, 3  # BANDWIDTH
RBF, IMQ, CONSTANT, COSINE, HINGE, NO_KERNEL = 0, 1, 2, 3, 4, 5  # PROFILE; the last three have no bandwidth
UNUSED, NORMS, PRODUCTS = 0, 1, 2  # GRADIENT: what `solve_kernel` reads of the products of gradients

MEASURES = 7  # numbers that `solve_kernel` measures per group, in the order of the fields of `Measure`
_MEASURES = tl.constexpr(MEASURES)
SHORTEST2 = tl.constexpr(SHORTEST**2)
_GOLDEN = tl.constexpr(-7046029254386353131)
_MIX_1 = tl.constexpr(-4658895280553007687)
_MIX_2 = tl.constexpr(-7723592293110705685)


@triton.jit
def _elements(column, inner, outer_stride, inner_stride, FLAT: tl.constexpr):
    """Compute indices of elements of a head."""
    if FLAT:  # a head is contiguous
        return column.to(tl.int64)
    outer = column // inner
    return outer.to(tl.int64) * outer_stride + (column - outer * inner) * inner_stride


@triton.jit
def _places(heads, head_stride, offset, CHUNKED: tl.constexpr):
    """Compute offsets of the elements of all heads in memory, [MP, BLOCK].

    With CHUNKED, the compiler may load 16 columns at once.
    """
    place = heads[:, None] * head_stride + offset[None, :]
    return tl.max_contiguous(tl.multiple_of(place, [1, 16]), [1, 16]) if CHUNKED else place


@triton.jit
def _places_of(head: tl.constexpr, head_stride, offset, CHUNKED: tl.constexpr):
    """Compute offsets of the elements of one head in memory, [BLOCK]."""
    place = head * head_stride + offset
    return tl.max_contiguous(tl.multiple_of(place, 16), 16) if CHUNKED else place


@triton.jit
def _strides(row):
    """Load the length of the inner axis and the strides of both axes; before a loop, which would load them again."""
    return tl.load(row + 3).to(tl.int32), tl.load(row + 1), tl.load(row + 2)  # 64-bit divisions are slow


@triton.jit
def _base(pointers, piece, which, kind: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(pointers + piece * 2 + which).to(tl.pointer_type(kind))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _sizes(row, ALIGNED: tl.constexpr):
    """Load the stride between heads and the number of elements of a head."""
    stride, size = tl.load(row), tl.load(row + 4).to(tl.int32)
    if ALIGNED:
        stride, size = tl.multiple_of(stride, 16), tl.multiple_of(size, 16)
    return stride, size


@triton.jit
def _bounds(size, split, SPLITS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Compute the range of columns of one program: its first column and its end."""
    length = tl.cdiv(tl.cdiv(size, SPLITS), BLOCK) * BLOCK
    first = split * length
    last = tl.minimum(first + length, size)
    return first, tl.multiple_of(last, 16) if ALIGNED else last


@triton.jit
def _load(
    base,
    start,
    last,
    heads,
    head_stride,
    strides,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    FLAT: tl.constexpr,
    CHUNKED: tl.constexpr,
):
    """Load a block of columns of all heads as float32 [MP, BLOCK], zero outside, and the mask of valid elements."""
    column = tl.multiple_of(start, BLOCK) + tl.arange(0, BLOCK)
    offset = _elements(column, strides[0], strides[1], strides[2], FLAT)
    inside = (heads[:, None] < M) & (column[None, :] < last)
    place = _places(heads, head_stride, offset, CHUNKED)
    return tl.load(base + place, mask=inside, other=0.0).to(tl.float32), inside


@triton.jit
def _norms(
    base,
    row,
    head_stride,
    first,
    last,
    M: tl.constexpr,
    MP: tl.constexpr,
    BLOCK: tl.constexpr,
    FLAT: tl.constexpr,
    CHUNKED: tl.constexpr,
):
    """Sum the squares of a range of columns of every head, [MP]."""
    heads = tl.arange(0, MP)
    strides = _strides(row)
    total = tl.zeros([MP, BLOCK], dtype=tl.float32)
    for start in range(first, last, BLOCK):
        x, _ = _load(base, start, last, heads, head_stride, strides, M, BLOCK, FLAT, CHUNKED)
        total += x * x
    return tl.sum(total, axis=1)


@triton.jit
def _products(
    base,
    row,
    head_stride,
    first,
    last,
    M: tl.constexpr,
    MP: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    FLAT: tl.constexpr,
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
        total = tl.zeros([LANES, MP, MP] if LANES > 1 else [MP, MP], dtype=tl.float32)
        with_mean = tl.zeros([MP], dtype=tl.float32)
    of_mean = tl.zeros([BLOCK], dtype=tl.float32)
    strides = _strides(row)
    for start in range(first, last, BLOCK):
        x, inside = _load(base, start, last, heads, head_stride, strides, M, BLOCK, FLAT, CHUNKED)
        mean = tl.sum(x, axis=0) / M
        centred = tl.where(inside, x - mean[None, :], 0.0)
        if not wide:
            total += centred[:, None, :] * centred[None, :, :]
            with_mean += centred * mean[None, :]
        else:
            with_mean += tl.sum(centred * mean[None, :], axis=1)
            if LANES > 1:
                lanes = tl.permute(tl.reshape(centred, [MP, LANES, BLOCK // LANES]), (1, 0, 2))
                total += tl.dot(lanes, tl.permute(lanes, (0, 2, 1)), input_precision=PRECISION)
            else:
                total += tl.dot(centred, tl.trans(centred), input_precision=PRECISION)
        of_mean += mean * mean
    if not wide:
        total = tl.sum(total, axis=2)
        with_mean = tl.sum(with_mean, axis=1)
    elif LANES > 1:
        total = tl.sum(total, axis=0)
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
    LANES: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    FLAT: tl.constexpr,
    CHUNKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    NORMS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute partial Gram matrices of centred heads [sources, slices, SPLITS, MP, MP], with products of the mean head.

    Source 0 is the weights, source 1 the gradients; the third axis of the grid has one or two of them. With NORMS only
    the squared norms of gradients are written: to the diagonal, not centred, with a mean of zero.

    A matrix of 16 or 32 heads is too small to be shared by warps, so LANES warps each take their own columns.
    """
    piece, split, source = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = table + piece * COLUMNS
    head_stride, size = _sizes(row, ALIGNED)
    base = _base(pointers, piece, source, KIND, ALIGNED)
    heads = tl.arange(0, MP)
    first, last = _bounds(size, split, SPLITS, BLOCK, ALIGNED)
    out = (source * tl.num_programs(0) + piece) * SPLITS + split
    if NORMS & (source == 1):
        norms2 = _norms(base, row, head_stride, first, last, M, MP, BLOCK, FLAT, CHUNKED)
        tl.store(products + out * MP * MP + heads * (MP + 1), norms2)
        tl.store(mean2 + out, 0.0)
    else:
        total, with_mean, of_mean = _products(
            base, row, head_stride, first, last, M, MP, BLOCK, LANES, FLAT, CHUNKED, PRECISION
        )
        tl.store(products + out * MP * MP + heads[:, None] * MP + heads[None, :], total)
        tl.store(to_mean + out * MP + heads, with_mean)
        tl.store(mean2 + out, of_mean)


@triton.jit
def _middle(values, counted, COUNT: tl.constexpr):
    """Find the two middle values of COUNT non-negative values (equal if COUNT is odd) by bisection, without sorting."""
    bits = tl.ravel(values.to(tl.float32).to(tl.int32, bitcast=True))  # non-negative floats sort like their bits
    counted = tl.ravel(counted)
    high = tl.max(tl.where(counted, bits, 0), axis=0)
    bits = tl.where(counted, bits, 0x7FFFFFFF)
    low = tl.maximum(tl.min(bits, axis=0), 0)
    while low < high:  # find the smallest value with more than (COUNT - 1) // 2 values at or below it
        middle = low + (high - low) // 2
        enough = tl.sum((bits <= middle).to(tl.int32), axis=0) > (COUNT - 1) // 2
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    beyond = tl.sum((bits <= low).to(tl.int32), axis=0) > COUNT // 2
    upper = tl.where(beyond, low, tl.min(tl.where(bits > low, bits, 0x7FFFFFFF), axis=0))
    return low.to(tl.float32, bitcast=True).to(tl.float64), upper.to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _norm(matrix, gram, cross, square, M: tl.constexpr, MP: tl.constexpr):
    """Compute the Frobenius norm of matrix @ heads, as `Gram.norm_of`; the matrix is zero outside of its M x M part."""
    i, j = tl.arange(0, MP)[:, None], tl.arange(0, MP)[None, :]
    product = tl.zeros([MP, MP], dtype=tl.float64)
    for k in range(M):  # a product of float64 matrices; `tl.dot` would need at least 16 heads
        column = tl.sum(tl.where(j == k, matrix, 0.0), axis=1)
        row = tl.sum(tl.where(i == k, gram, 0.0), axis=0)
        product += column[:, None] * row[None, :]
    sums = tl.sum(matrix, axis=1)
    with_mean = tl.sum(matrix * cross[None, :], axis=1)
    norms2 = tl.sum(product * matrix, axis=1) + 2 * sums * with_mean + sums * sums * square
    norm2 = tl.sum(norms2, axis=0)
    return tl.sqrt(tl.where(norm2 < 0, 0.0, norm2))  # NaN stays NaN


@triton.jit
def _measure_heads(out, gram, cross, square, d2, M: tl.constexpr, MP: tl.constexpr):
    """Write the mean distance, the mean cosine and the largest cosine of pairs of heads."""
    i, j = tl.arange(0, MP)[:, None], tl.arange(0, MP)[None, :]
    if M == 1:
        tl.store(out + 3, square * 0 + float("nan"))
        tl.store(out + 5, square * 0 + float("nan"))
        tl.store(out + 6, square * 0 + float("nan"))
    else:
        pair = (i < M) & (j < M) & (i < j)
        norms2 = tl.sum(tl.where(i == j, gram, 0.0), axis=1) + 2 * cross + square
        mean2 = tl.sum(tl.where(tl.arange(0, MP) < M, norms2, 0.0), axis=0) / M
        is_zero = norms2 <= SHORTEST2 * tl.maximum(mean2, 0.0)
        inverse = tl.where(is_zero, 0.0, 1 / tl.sqrt(tl.where(is_zero, 1.0, norms2)))
        inner = gram + cross[:, None] + cross[None, :] + square
        cosine = inner * inverse[:, None] * inverse[None, :]
        count: tl.constexpr = M * (M - 1) // 2
        mean = tl.sum(tl.sum(tl.where(pair, cosine, 0.0), axis=1), axis=0) / count
        largest = tl.max(tl.max(tl.where(pair, cosine, -2.0), axis=1), axis=0)
        tl.store(out + 3, tl.sum(tl.sum(tl.where(pair, tl.sqrt(d2), 0.0), axis=1), axis=0) / count)
        tl.store(out + 5, mean)
        tl.store(out + 6, largest + mean * 0)  # NaN if any cosine is NaN


@triton.jit
def solve_kernel(
    products,
    to_mean,
    mean2,
    starts,
    settings,
    scale,
    drive,
    force,
    row_sums,
    measures,
    first_gradient,
    M: tl.constexpr,
    MP: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    BANDWIDTH: tl.constexpr,
    PROFILE: tl.constexpr,
    SPHERE: tl.constexpr,
    SMOOTHED: tl.constexpr,
    HOLDS_RATIO: tl.constexpr,
    GRADIENT: tl.constexpr,
    SCALED: tl.constexpr,
    MEASURE: tl.constexpr,
):
    """Compute A, B [groups, MP, MP] and the row sums of B [groups, MP] from partial products, CHUNK at a time.

    With MEASURE, also write the fields of `Measure`, [groups, MEASURES]. Partial products of the gradients follow those
    of the weights, from index `first_gradient` on.
    """
    # Sums of 2 or 4 at a time are wrong on a GPU (Triton 3.6), though not in the interpreter.
    tl.static_assert((CHUNK == 1) | ((CHUNK == SPLITS) & (CHUNK >= 16)))
    group = tl.program_id(0)
    stepsize, alpha, own = tl.load(settings), tl.load(settings + 1), tl.load(settings + 2)
    smoothing, precision, fixed = tl.load(settings + 3), tl.load(settings + 4), tl.load(settings + 5)
    floor2, log_heads = tl.load(settings + 6), tl.load(settings + 7)
    heads = tl.arange(0, MP)
    i, j = heads[:, None], heads[None, :]
    some = tl.arange(0, CHUNK)
    gram = tl.zeros([MP, MP], dtype=tl.float64)
    cross = tl.zeros([MP], dtype=tl.float64)
    square = tl.sum(tl.zeros([2], dtype=tl.float64), axis=0)
    grad_gram, grad_cross, grad_square = gram, cross, square  # of the gradients
    grad_norms2 = cross
    begin, end = tl.load(starts + group) * SPLITS, tl.load(starts + group + 1) * SPLITS
    if (PROFILE == 5) & (GRADIENT == 0):
        end = begin  # nothing depends on the heads
    for first in tl.range(begin, end, CHUNK, num_stages=STAGES):
        part = first + some
        squares = tl.load(products + part[:, None, None] * MP * MP + (i * MP + j)[None, :, :])  # [CHUNK, MP, MP]
        gram += tl.sum(squares.to(tl.float64), axis=0)
        cross += tl.sum(tl.load(to_mean + part[:, None] * MP + heads[None, :]).to(tl.float64), axis=0)
        square += tl.sum(tl.load(mean2 + part).to(tl.float64), axis=0)
        if GRADIENT > 0:
            part += first_gradient
            grad_square += tl.sum(tl.load(mean2 + part).to(tl.float64), axis=0)
        if GRADIENT == 1:
            own2 = tl.load(products + part[:, None] * MP * MP + (heads * (MP + 1))[None, :])  # [CHUNK, MP]
            grad_norms2 += tl.sum(own2.to(tl.float64), axis=0)
        if GRADIENT == 2:
            squares = tl.load(products + part[:, None, None] * MP * MP + (i * MP + j)[None, :, :])
            grad_gram += tl.sum(squares.to(tl.float64), axis=0)
            grad_cross += tl.sum(tl.load(to_mean + part[:, None] * MP + heads[None, :]).to(tl.float64), axis=0)
    valid = (i < M) & (j < M)
    eye = i == j
    own_i = tl.sum(tl.where(eye, gram, 0.0), axis=1)
    d2 = own_i[:, None] + own_i[None, :] - 2 * gram
    d2 = tl.where(eye | (d2 < 0), 0.0, d2)
    if MEASURE:
        _measure_heads(measures + group * _MEASURES, gram, cross, square, d2, M, MP)
    apart2 = tl.max(tl.max(tl.where(valid, d2, 0.0), axis=1), axis=0)  # zero if all heads are equal
    norms2 = own_i + 2 * cross + square
    scale2 = tl.sum(tl.where(heads < M, norms2, 0.0), axis=0) / M
    zero = (norms2 <= SHORTEST2 * tl.maximum(scale2, 0.0)).to(tl.int32)  # heads without a direction
    norms = tl.sqrt(tl.where(zero > 0, 1.0, norms2))
    outer = norms[:, None] * norms[None, :]
    pushes = (zero[:, None] + zero[None, :]) == 0
    cosine = (gram + cross[:, None] + cross[None, :] + square) / outer
    if SPHERE & (PROFILE < 3):
        apart = norms[:, None] - norms[None, :]
        d2 = (d2 - apart * apart) / outer
        d2 = tl.where(eye | (d2 < 0), 0.0, d2)
        d2 = tl.where(pushes, d2, tl.where(zero[:, None] != zero[None, :], 1.0, 0.0))
        cosine = 1 - d2 / 2  # accurate for nearly equal heads
        scale2 = scale2 * 0 + 1
    if PROFILE >= 3:
        h = square * 0 + float("nan")
    elif BANDWIDTH == 2:
        h = scale2 * 0 + fixed
    elif M == 1:
        h = scale2 * 0 + 1
    else:
        if BANDWIDTH == 0:
            low, high = _middle(d2, valid & (i < j), M * (M - 1) // 2)
            low, high = tl.sqrt(low), tl.sqrt(high)
            h = (low + high) * (low + high) / 4 / log_heads
        elif BANDWIDTH == 1:
            low, high = _middle(d2, valid, M * M)
            h = (low + high) / 2 / log_heads
        else:
            low, high = _middle(d2, valid, M * M)
            h = low / log_heads
        h = tl.maximum(h, floor2 * scale2)
    unit = eye.to(tl.float64)
    kernel = unit
    weight = tl.zeros([MP, MP], dtype=tl.float64)
    if PROFILE < 3:
        safe = tl.where(h == 0, 1.0, h)  # every head is zero: they are equal, and no force acts
        acts = tl.where(h == 0, 0.0, 1.0)
        ratio = d2 / safe
        if PROFILE == 0:
            kernel = tl.exp(-ratio)
            slope = kernel
        elif PROFILE == 1:
            kernel = 1 / tl.sqrt(1 + ratio)
            slope = 0.5 * kernel / (1 + ratio)
        else:
            kernel = unit + (1 - unit) / M
            slope = weight + 1.0 / M
        weight = tl.where(valid & (i != j), acts * slope / safe, 0.0)
    elif PROFILE == 3:
        kernel = tl.where(eye, 1.0, tl.where(pushes, cosine, 0.0))
        weight = tl.where(valid & (i != j), weight + 0.5, 0.0)
    elif PROFILE == 4:
        weight = tl.where(valid & (i != j) & (cosine > fixed), weight + 0.5, 0.0)
    if SPHERE:
        weight = tl.where(pushes, weight, 0.0)
        own_force = tl.sum(2 * weight * cosine, axis=1) / (norms * norms)
        repulsion = tl.where(eye, own_force[:, None], -2 * weight / outer)
    elif PROFILE == 3:
        weight = tl.where(pushes, 2 * weight, 0.0)
        own_force = tl.sum(weight / outer, axis=1)
        repulsion = tl.where(eye, own_force[:, None], -weight * cosine / (norms * norms)[None, :])
    else:
        repulsion = 2 * tl.where(eye, tl.sum(weight, axis=1)[:, None], -weight)
    push = tl.where(valid, stepsize / M * repulsion, 0.0)  # the repulsive part at alpha = 1
    if PROFILE == 5:
        a = stepsize * own * unit
    elif SMOOTHED:
        a = stepsize * ((smoothing * kernel + (1 - smoothing) * unit) / M + own * unit)
    else:
        a = stepsize * (unit / M + own * unit)
    a = tl.where(valid, a, 0.0)
    if GRADIENT > 0:
        if GRADIENT == 2:
            drive_norm = _norm(a, grad_gram, grad_cross, grad_square, M, MP)
        else:
            factor = tl.max(tl.max(a, axis=1), axis=0)  # A is a multiple of the identity
            drive_norm = factor * tl.sqrt(tl.sum(grad_norms2, axis=0) + M * grad_square)
        if SCALED:
            drive_norm = drive_norm / tl.load(scale).to(tl.float64)
        push_norm = tl.where(apart2 == 0, 0.0, _norm(push, gram, cross, square, M, MP))
        if HOLDS_RATIO:
            is_still = push_norm == 0  # equal heads, or a single one
            alpha = tl.where(is_still, 0.0, alpha * drive_norm / tl.where(is_still, 1.0, push_norm))
        if MEASURE:
            out = measures + group * _MEASURES
            tl.store(out, drive_norm)
            tl.store(out + 1, alpha * push_norm)
            tl.store(out + 2, h)
            tl.store(out + 4, alpha.to(tl.float64))
    b = precision * a - alpha * push
    place = group * MP * MP + i * MP + j
    tl.store(drive + place, a.to(tl.float32))
    tl.store(force + place, b.to(tl.float32))
    tl.store(row_sums + group * MP + heads, tl.sum(b, axis=1).to(tl.float32))


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
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    FLAT: tl.constexpr,
    CHUNKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    SHARDED: tl.constexpr,
    SCALED: tl.constexpr,
    NOISE: tl.constexpr,
    FORCE: tl.constexpr,
    SCALAR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the new gradients in place: grad <- A grad + B theta + sigma xi; B is zero without FORCE.

    With SCALAR, A is a multiple of the identity, and no product of matrices is needed for A grad.

    Noise depends on the index of an element in its head. With SHARDED, a head is a part of a larger one: runs of
    adjacent elements, at equal distances. `shards` [slices, 4] has the length of a run, the distance between the starts
    of two runs, the index of the first element, and the number of elements of the whole head.
    """
    piece, split = tl.program_id(0), tl.program_id(1)
    row = table + piece * COLUMNS
    head_stride, size = _sizes(row, ALIGNED)
    group = tl.load(row + 7)
    theta, grad = _base(pointers, piece, 0, KIND, ALIGNED), _base(pointers, piece, 1, KIND, ALIGNED)
    heads = tl.arange(0, MP)
    first, last = _bounds(size, split, SPLITS, BLOCK, ALIGNED)
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
    strides = _strides(row)
    outer_element, inner_element = tl.load(row + 5), tl.load(row + 6)
    for start in range(first, last, BLOCK):
        column = tl.multiple_of(start, BLOCK) + tl.arange(0, BLOCK)
        offset = _elements(column, strides[0], strides[1], strides[2], FLAT)
        place = _places(heads, head_stride, offset, CHUNKED)
        there = column < last
        inside = (heads[:, None] < M) & there[None, :]
        if SCALAR or MP >= 16:
            g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
            if SCALAR:
                out = multiple * g
            else:
                out = tl.dot(a, g, input_precision=PRECISION)
        else:
            out = tl.zeros([MP, BLOCK], dtype=tl.float32)
            for k in tl.static_range(M):
                g = tl.load(grad + _places_of(k, head_stride, offset, CHUNKED), mask=there, other=0.0).to(tl.float32)
                out += tl.load(drive + group * MP * MP + heads * MP + k)[:, None] * g[None, :]
        if FORCE:
            if MP >= 16:
                t = tl.load(theta + place, mask=inside, other=0.0)
                t = t.to(tl.float32)
                mean = tl.sum(t, axis=0) / M
                t = tl.where(inside, t - mean[None, :], 0.0)
                push = tl.dot(b, t, input_precision=PRECISION) + sums[:, None] * mean[None, :]
            else:
                mean = tl.zeros([BLOCK], dtype=tl.float32)
                for k in tl.static_range(M):
                    mean += tl.load(theta + _places_of(k, head_stride, offset, CHUNKED), mask=there, other=0.0).to(
                        tl.float32
                    )
                mean = mean / M
                push = sums[:, None] * mean[None, :]
                for k in tl.static_range(M):
                    t = (
                        tl.load(theta + _places_of(k, head_stride, offset, CHUNKED), mask=there, other=0.0).to(
                            tl.float32
                        )
                        - mean
                    )
                    push += tl.load(force + group * MP * MP + heads * MP + k)[:, None] * t[None, :]
            out += push * factor
        if NOISE:
            element = _elements(column, strides[0], outer_element, inner_element, FLAT)
            if SHARDED:
                length = tl.load(shards + piece * 4)
                run = element.to(tl.int32) // length.to(tl.int32)  # 64-bit divisions are slow
                element += run * (tl.load(shards + piece * 4 + 1) - length) + tl.load(shards + piece * 4 + 2)
            element = heads[:, None].to(tl.int64) * whole_size + element[None, :]
            noise = _normal(tl.load(row + 8), tl.load(steps), element)
            out += noise * tl.load(sigmas + piece) * factor
        tl.store(grad + place, out.to(KIND), mask=inside)
