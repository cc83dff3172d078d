"""Triton kernels for attention over packed sentences: one launch forward and one backward.

A program computes one head of one sentence, with queries and keys in tiles of BLOCK tokens; most sentences are one
tile. The heads of a token are contiguous; tokens have a stride, the same for keys and values. Attention weights are
never stored. Programs beyond the last sentence write zeros to the unused tokens after it.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

TAIL = 64  # number of programs that clear the unused tokens


@triton.jit
def _tile(base, row_stride, head, first, last, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the addresses of the tokens of a tile, [BLOCK, DIM], and a mask of existing tokens."""
    rows, columns = first + tl.arange(0, BLOCK), tl.arange(0, DIM)
    there = (rows < last)[:, None] & (columns < DIM)[None, :]
    return base + rows[:, None].to(tl.int64) * row_stride + head * DIM + columns[None, :], there


@triton.jit
def _clear(out, row_stride, head, first, rows, DIM: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, number):
    """Write zeros to this program's share of the unused tokens."""
    for start in range(first + number * BLOCK, rows, TAIL * BLOCK):
        place, there = _tile(out, row_stride, head, start, rows, DIM, BLOCK)
        tl.store(place, tl.zeros([BLOCK, DIM], dtype=out.dtype.element_ty), mask=there)


@triton.jit
def _scores(q, k, first, first_key, q_start, k_start, k_end, scale, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the scaled scores of a tile, for base-2 exponentials; minus infinity where masked."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    keys = first_key + tl.arange(0, BLOCK)
    seen = (keys < k_end)[None, :]
    if CAUSAL:
        seen = seen & ((keys - k_start)[None, :] <= (first - q_start + tl.arange(0, BLOCK))[:, None])
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    out,
    sums,
    q_starts,
    k_starts,
    sentences,
    rows,
    scale,
    q_stride,
    k_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Compute out = softmax(q k^T) v of every sentence, and `sums` [rows, HEADS], log2 of softmax denominators."""
    sentence, head = tl.program_id(0), tl.program_id(1)
    if sentence >= sentences:
        end = tl.load(q_starts + sentences)
        _clear(out, HEADS * DIM, head, end, rows, DIM, BLOCK, TAIL, sentence - sentences)
    else:
        q_start, q_end = tl.load(q_starts + sentence), tl.load(q_starts + sentence + 1)
        k_start, k_end = tl.load(k_starts + sentence), tl.load(k_starts + sentence + 1)
        for first in range(q_start, q_end, BLOCK):
            place, there = _tile(q, q_stride, head, first, q_end, DIM, BLOCK)
            queries = tl.load(place, mask=there, other=0.0)
            most = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
            total = tl.zeros([BLOCK], dtype=tl.float32)
            mixed = tl.zeros([BLOCK, DIM], dtype=tl.float32)
            last = k_end
            if CAUSAL:
                last = tl.minimum(k_end, k_start + first - q_start + BLOCK)
            for first_key in range(k_start, last, BLOCK):
                place, seen = _tile(k, k_stride, head, first_key, k_end, DIM, BLOCK)
                keys = tl.load(place, mask=seen, other=0.0)
                scores = _scores(queries, keys, first, first_key, q_start, k_start, k_end, scale, CAUSAL, BLOCK)
                higher = tl.maximum(most, tl.max(scores, axis=1))
                weights = tl.exp2(scores - higher[:, None])
                shrunk = tl.exp2(most - higher)
                place, seen = _tile(v, k_stride, head, first_key, k_end, DIM, BLOCK)
                values = tl.load(place, mask=seen, other=0.0)
                mixed = mixed * shrunk[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
                total = total * shrunk + tl.sum(weights, axis=1)
                most = higher
            some = total > 0  # False if the other sentence of a pair is empty
            mixed = tl.where(some[:, None], mixed / tl.where(some, total, 1.0)[:, None], 0.0)
            place, there = _tile(out, HEADS * DIM, head, first, q_end, DIM, BLOCK)
            tl.store(place, mixed.to(out.dtype.element_ty), mask=there)
            tokens = first + tl.arange(0, BLOCK)
            logs = tl.where(some, most + tl.log2(tl.where(some, total, 1.0)), 0.0)
            tl.store(sums + tokens * HEADS + head, logs, mask=tokens < q_end)


@triton.jit
def _backward_tile(
    q,
    k,
    v,
    grad,
    out,
    sums,
    head,
    first,
    first_key,
    q_start,
    q_end,
    k_start,
    k_end,
    keys,
    values,
    scale,
    factor,
    q_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Return a tile's queries, gradient of its outputs, attention weights, and gradient of its scores."""
    place, there = _tile(q, q_stride, head, first, q_end, DIM, BLOCK)
    queries = tl.load(place, mask=there, other=0.0)
    place, there = _tile(grad, HEADS * DIM, head, first, q_end, DIM, BLOCK)
    gradient = tl.load(place, mask=there, other=0.0)
    place, there = _tile(out, HEADS * DIM, head, first, q_end, DIM, BLOCK)
    own = tl.sum(gradient.to(tl.float32) * tl.load(place, mask=there, other=0.0).to(tl.float32), axis=1)  # [BLOCK]
    tokens = first + tl.arange(0, BLOCK)
    logs = tl.load(sums + tokens * HEADS + head, mask=tokens < q_end, other=0.0)
    scores = _scores(queries, keys, first, first_key, q_start, k_start, k_end, scale, CAUSAL, BLOCK)
    weights = tl.where((tokens < q_end)[:, None], tl.exp2(scores - logs[:, None]), 0.0)
    of_weights = tl.dot(gradient, tl.trans(values), input_precision="ieee")
    of_scores = weights * (of_weights - own[:, None]) * factor
    return queries, gradient, weights, of_scores


@triton.jit
def backward_kernel(
    q,
    k,
    v,
    grad,
    out,
    sums,
    of_q,
    of_k,
    of_v,
    q_starts,
    k_starts,
    sentences,
    q_rows,
    k_rows,
    scale,
    factor,
    q_stride,
    k_stride,
    of_q_stride,
    of_k_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Compute the gradients of q, k and v; attention weights are recomputed."""
    sentence, head = tl.program_id(0), tl.program_id(1)
    if sentence >= sentences:
        number = sentence - sentences
        _clear(of_q, of_q_stride, head, tl.load(q_starts + sentences), q_rows, DIM, BLOCK, TAIL, number)
        _clear(of_k, of_k_stride, head, tl.load(k_starts + sentences), k_rows, DIM, BLOCK, TAIL, number)
        _clear(of_v, of_k_stride, head, tl.load(k_starts + sentences), k_rows, DIM, BLOCK, TAIL, number)
    else:
        q_start, q_end = tl.load(q_starts + sentence), tl.load(q_starts + sentence + 1)
        k_start, k_end = tl.load(k_starts + sentence), tl.load(k_starts + sentence + 1)
        single = k_end - k_start <= BLOCK
        for first_key in range(k_start, k_end, BLOCK):
            place, seen = _tile(k, k_stride, head, first_key, k_end, DIM, BLOCK)
            keys = tl.load(place, mask=seen, other=0.0)
            place, seen = _tile(v, k_stride, head, first_key, k_end, DIM, BLOCK)
            values = tl.load(place, mask=seen, other=0.0)
            to_keys = tl.zeros([BLOCK, DIM], dtype=tl.float32)
            to_values = tl.zeros([BLOCK, DIM], dtype=tl.float32)
            begin = q_start
            if CAUSAL:
                begin = q_start + first_key - k_start  # earlier queries are masked
            for first in range(begin, q_end, BLOCK):
                queries, gradient, weights, of_scores = _backward_tile(
                    q,
                    k,
                    v,
                    grad,
                    out,
                    sums,
                    head,
                    first,
                    first_key,
                    q_start,
                    q_end,
                    k_start,
                    k_end,
                    keys,
                    values,
                    scale,
                    factor,
                    q_stride,
                    HEADS,
                    DIM,
                    BLOCK,
                    CAUSAL,
                )
                to_values += tl.dot(tl.trans(weights.to(gradient.dtype)), gradient, input_precision="ieee")
                of_scores = of_scores.to(queries.dtype)
                to_keys += tl.dot(tl.trans(of_scores), queries, input_precision="ieee")
                if single:
                    to_queries = tl.dot(of_scores, keys, input_precision="ieee")
                    place, there = _tile(of_q, of_q_stride, head, first, q_end, DIM, BLOCK)
                    tl.store(place, to_queries.to(of_q.dtype.element_ty), mask=there)
            place, seen = _tile(of_k, of_k_stride, head, first_key, k_end, DIM, BLOCK)
            tl.store(place, to_keys.to(of_k.dtype.element_ty), mask=seen)
            place, seen = _tile(of_v, of_k_stride, head, first_key, k_end, DIM, BLOCK)
            tl.store(place, to_values.to(of_v.dtype.element_ty), mask=seen)
        if (not single) | (k_end == k_start):
            for first in range(q_start, q_end, BLOCK):
                to_queries = tl.zeros([BLOCK, DIM], dtype=tl.float32)
                last = k_end
                if CAUSAL:
                    last = tl.minimum(k_end, k_start + first - q_start + BLOCK)
                for first_key in range(k_start, last, BLOCK):
                    place, seen = _tile(k, k_stride, head, first_key, k_end, DIM, BLOCK)
                    keys = tl.load(place, mask=seen, other=0.0)
                    place, seen = _tile(v, k_stride, head, first_key, k_end, DIM, BLOCK)
                    values = tl.load(place, mask=seen, other=0.0)
                    queries, gradient, weights, of_scores = _backward_tile(
                        q,
                        k,
                        v,
                        grad,
                        out,
                        sums,
                        head,
                        first,
                        first_key,
                        q_start,
                        q_end,
                        k_start,
                        k_end,
                        keys,
                        values,
                        scale,
                        factor,
                        q_stride,
                        HEADS,
                        DIM,
                        BLOCK,
                        CAUSAL,
                    )
                    to_queries += tl.dot(of_scores.to(queries.dtype), keys, input_precision="ieee")
                place, there = _tile(of_q, of_q_stride, head, first, q_end, DIM, BLOCK)
                tl.store(place, to_queries.to(of_q.dtype.element_ty), mask=there)
