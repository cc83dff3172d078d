"""Triton kernel `solve_kernel`: the matrices A and B of every group from inner products of its heads.

One program per group adds the partial products of `gram_kernel` in float64 and computes, with kernel matrix K,
squared distances d2 and bandwidth h,

    A = stepsize ((smoothing K + (1 - smoothing) I) / M + own_drive I)
    B = precision A - alpha stepsize / M R

Without a kernel, A = stepsize own_drive I and R = 0. Otherwise R theta is the repulsion between heads. For the RBF
kernel on weights, R[i, j] = -2 K[i, j] / h for i != j, and the rows of R add up to zero. If a rule holds a ratio,
alpha = ratio |A grad| / |stepsize / M R theta|, where the last norm is at least its own rounding error. `particles` has
the formulas of all kernels, and `RadialForm` the numbers of a rule.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from repulsive.particles.gram import SINGLE_ERROR
from repulsive.particles.kernels import SHORTEST

# Values of the constants below; inside the Triton kernels they are written as numbers.
PAPER, RELEASED, FIXED, LOWER = 0, 1, 2, 3  # BANDWIDTH
RBF, IMQ, CONSTANT, COSINE, HINGE, NO_KERNEL = 0, 1, 2, 3, 4, 5  # PROFILE; the last three have no bandwidth
UNUSED, NORMS, PRODUCTS = 0, 1, 2  # GRADIENT: what `solve_kernel` reads of the products of gradients

MEASURES = 7  # numbers that `solve_kernel` measures per group, in the order of the fields of `Measure`
_MEASURES = tl.constexpr(MEASURES)
SHORTEST2 = tl.constexpr(SHORTEST**2)
_ERROR = tl.constexpr(SINGLE_ERROR)  # partial products are float32 numbers


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
def _rounding(matrix, gram, square, MP: tl.constexpr):
    """Estimate the rounding error of `_norm`, as `Gram.rounding_of`."""
    i, j = tl.arange(0, MP)[:, None], tl.arange(0, MP)[None, :]
    own = tl.sum(tl.where(i == j, gram, 0.0), axis=0)
    lengths = tl.sqrt(tl.where(own < 0, 0.0, own))
    sums = tl.abs(tl.sum(matrix, axis=1))
    terms = tl.sum(tl.abs(matrix) * lengths[None, :], axis=1) + sums * tl.sqrt(square)
    return _ERROR * tl.sqrt(tl.sum(terms * terms, axis=0))


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

    The grid covers groups. With MEASURE, also write the fields of `Measure`, [groups, MEASURES].
    Partial products of the gradients follow those of the weights, from index `first_gradient` on.
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
            # With float32 sums this is larger than in `SVGD.weight_of`: a smaller force is limited, not omitted.
            rounding = _rounding(push, gram, square, MP)
            is_still = (apart2 == 0) | (rounding == 0)  # equal heads, or a single one
            norm = tl.where(push_norm < rounding, rounding, push_norm)  # NaN stays NaN
            alpha = tl.where(is_still, 0.0, alpha * drive_norm / tl.where(is_still, 1.0, norm))
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
