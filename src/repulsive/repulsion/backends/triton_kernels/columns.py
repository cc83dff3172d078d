"""Products of heads on ordinary float32 units, with the columns of a thread in registers.

A thread reads one to four adjacent columns of all M heads and multiplies them itself. Products on tensor cores need
heads padded to 16, numbers split into TF32 parts, and shared memory to hand them to other threads, and each of these
steps waits for the one before. Here the products of a thread depend on its own loads alone, so that memory is
nearer to being the limit: with 12 heads an update of GPT-2's weights takes 18 % less time on an H200.

Blocks of heads are tuples of M tensors [BLOCK], one per head. Triton has tuples from version 3.3 on.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005  Triton cannot unpack a tuple inside another one
import triton
import triton.language as tl

from repulsive.repulsion.backends.triton_kernels.slices import head_offsets, head_starts


@triton.jit
def load_heads(
    base,
    pointers,
    piece,
    which,
    head_stride,
    offset,
    there,
    M: tl.constexpr,
    MP: tl.constexpr,
    CHUNKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    APART: tl.constexpr,
):
    """Load the same columns of all heads as float32, zero outside: a tuple of M tensors [BLOCK]."""
    values = ()
    for i in tl.static_range(M):
        start = head_starts(pointers, tl.num_programs(0), piece, which, i, head_stride, MP, ALIGNED, APART)
        value = tl.load(base + head_offsets(start, offset, CHUNKED), mask=there, other=0.0)
        values = values + (value.to(tl.float32),)
    return values


@triton.jit
def centre(values, M: tl.constexpr):
    """Subtract the mean head; return the centred heads and the mean."""
    mean = values[0]
    for i in tl.static_range(1, M):
        mean += values[i]
    mean = mean / M
    centred = ()
    for i in tl.static_range(M):
        centred = centred + (values[i] - mean,)
    return centred, mean
