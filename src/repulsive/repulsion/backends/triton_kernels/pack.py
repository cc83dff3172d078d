"""Triton kernels around the all-reduce of a sharded update: pack inner products into one buffer, and unpack the sums.

The numbers of a group are the upper triangle of its matrix of centred products, row by row, then the products with the
mean head, then the squared norm of the mean head: (M + 1) (M + 2) / 2 numbers in float64. Those of its gradients follow
after the weights of all groups. If only the norms of gradients are needed, they are the diagonal and the squared norm
of the mean gradient: M + 1 numbers.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def _triangle(M: tl.constexpr, MP: tl.constexpr):
    """Compute the index of each pair of heads in the packed triangle, [MP, MP]; equal for (i, j) and (j, i)."""
    i, j = tl.arange(0, MP)[:, None], tl.arange(0, MP)[None, :]
    first, second = tl.minimum(i, j), tl.maximum(i, j)
    return first * M - first * (first - 1) // 2 + second - first


@triton.jit
def _total(
    products, to_mean, mean2, counted, begin, end, offset, MP: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr
):
    """Sum the partial products `begin` to `end` in float64, without slices that are not counted on this rank."""
    heads = tl.arange(0, MP)
    square = heads[:, None] * MP + heads[None, :]
    gram = tl.zeros([MP, MP], dtype=tl.float64)
    cross = tl.zeros([MP], dtype=tl.float64)
    norm2 = tl.sum(tl.zeros([2], dtype=tl.float64), axis=0)
    for part in tl.range(begin, end, num_stages=STAGES):
        counts = tl.load(counted + part // SPLITS) != 0
        place = offset + part
        gram += tl.where(counts, tl.load(products + place * MP * MP + square).to(tl.float64), 0.0)
        cross += tl.where(counts, tl.load(to_mean + place * MP + heads).to(tl.float64), 0.0)
        norm2 += tl.where(counts, tl.load(mean2 + place).to(tl.float64), 0.0)
    return gram, cross, norm2


@triton.jit
def _store_triangle(packed, gram, cross, norm2, M: tl.constexpr, MP: tl.constexpr):
    heads = tl.arange(0, MP)
    i, j = heads[:, None], heads[None, :]
    tl.store(packed + _triangle(M, MP), gram, mask=(i <= j) & (j < M))
    tl.store(packed + M * (M + 1) // 2 + heads, cross, mask=heads < M)
    tl.store(packed + M * (M + 1) // 2 + M, norm2)


@triton.jit
def pack_kernel(
    products,
    to_mean,
    mean2,
    starts,
    counted,
    packed,
    first_gradient,
    M: tl.constexpr,
    MP: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    GRADIENT: tl.constexpr,
):
    """Sum the partial products of each group over its slices and splits, and store them in the buffer `packed`.

    GRADIENT is the constant of `solve_kernel`: 0 for no gradients, 1 for their norms, 2 for their products.
    """
    group, groups = tl.program_id(0), tl.num_programs(0)
    size: tl.constexpr = (M + 1) * (M + 2) // 2
    begin, end = tl.load(starts + group) * SPLITS, tl.load(starts + group + 1) * SPLITS
    gram, cross, norm2 = _total(products, to_mean, mean2, counted, begin, end, 0, MP, SPLITS, STAGES)
    _store_triangle(packed + group * size, gram, cross, norm2, M, MP)
    if GRADIENT > 0:
        gram, cross, norm2 = _total(products, to_mean, mean2, counted, begin, end, first_gradient, MP, SPLITS, STAGES)
        if GRADIENT == 2:
            _store_triangle(packed + (groups + group) * size, gram, cross, norm2, M, MP)
        else:
            heads = tl.arange(0, MP)
            norms2 = tl.sum(tl.where(heads[:, None] == heads[None, :], gram, 0.0), axis=1)
            target = packed + groups * size + group * (M + 1)
            tl.store(target + heads, norms2, mask=heads < M)
            tl.store(target + M, norm2)


@triton.jit
def _unpack_triangle(packed, products, to_mean, mean2, place, M: tl.constexpr, MP: tl.constexpr):
    heads = tl.arange(0, MP)
    i, j = heads[:, None], heads[None, :]
    gram = tl.load(packed + _triangle(M, MP), mask=(i < M) & (j < M), other=0.0)
    tl.store(products + place * MP * MP + i * MP + j, gram)
    tl.store(to_mean + place * MP + heads, tl.load(packed + M * (M + 1) // 2 + heads, mask=heads < M, other=0.0))
    tl.store(mean2 + place, tl.load(packed + M * (M + 1) // 2 + M))


@triton.jit
def unpack_kernel(packed, products, to_mean, mean2, M: tl.constexpr, MP: tl.constexpr, GRADIENT: tl.constexpr):
    """Write the sums of each group in the layout that `solve_kernel` reads: one slice and one split per group."""
    group, groups = tl.program_id(0), tl.num_programs(0)
    size: tl.constexpr = (M + 1) * (M + 2) // 2
    _unpack_triangle(packed + group * size, products, to_mean, mean2, group, M, MP)
    if GRADIENT == 2:
        _unpack_triangle(packed + (groups + group) * size, products, to_mean, mean2, groups + group, M, MP)
    elif GRADIENT == 1:
        heads = tl.arange(0, MP)
        source = packed + groups * size + group * (M + 1)
        norms2 = tl.load(source + heads, mask=heads < M, other=0.0)
        tl.store(products + (groups + group) * MP * MP + heads * (MP + 1), norms2)
        tl.store(mean2 + groups + group, tl.load(source + M))
