"""Read slices of weights and gradients through the table of slices.

A row of the table describes one slice, in elements. Its columns are:

- 0-2: strides over heads, over an outer and over an inner axis
- 3: length of the inner axis
- 4: elements per head
- 5-6: strides of the logical element index over the outer and the inner axis
- 7: index of the group
- 8: noise stream

Column c of head i of a slice is at base + i * stride 0 + (c // inner) * stride 1 + (c % inner) * stride 2. Weight and
gradient have the same strides; only their addresses [slices, 2] change between steps.

With APART, heads are in several tensors, and stride 0 is not used. The addresses are those of head 0, and the starts
of all heads relative to them follow, in elements: [slices, 2, MP].

Constants of the functions: FLAT if every head is contiguous, ALIGNED if addresses, strides between heads (or their
starts) and sizes are multiples of 16, CHUNKED if also 16 columns that follow each other are adjacent in memory. INNER
is the length of the inner axis if it is the same in all slices, otherwise 0: divisions by a constant take fewer
instructions.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def element_indices(column, inner, outer_stride, inner_stride, FLAT: tl.constexpr, CHUNKED: tl.constexpr = False):
    """Compute indices of elements of a head. With CHUNKED, they are offsets of which 16 at a time are adjacent."""
    if FLAT:  # a head is contiguous
        return column.to(tl.int64)
    outer = column // inner
    index = outer.to(tl.int64) * outer_stride + (column - outer * inner) * inner_stride
    return tl.max_contiguous(tl.multiple_of(index, 16), 16) if CHUNKED else index


@triton.jit
def head_starts(
    pointers, slices, piece, which, heads, head_stride, MP: tl.constexpr, ALIGNED: tl.constexpr, APART: tl.constexpr
):
    """Compute where heads start relative to the address of a slice, in elements, with the shape of `heads`.

    `slices` is the number of slices of the table; `which` is 0 for the weights and 1 for the gradients.
    """
    if APART:
        starts = tl.load(pointers + slices * 2 + (piece * 2 + which) * MP + heads)
        if ALIGNED:
            starts = tl.multiple_of(starts, 16)
    else:
        starts = heads * head_stride
    return starts


@triton.jit
def block_offsets(starts, offset, CHUNKED: tl.constexpr):
    """Compute offsets of the elements of all heads in memory, [MP, BLOCK].

    With CHUNKED, the compiler may load 16 columns at once.
    """
    place = starts[:, None] + offset[None, :]
    return tl.max_contiguous(tl.multiple_of(place, [1, 16]), [1, 16]) if CHUNKED else place


@triton.jit
def head_offsets(start, offset, CHUNKED: tl.constexpr):
    """Compute offsets of the elements of one head in memory, [BLOCK]."""
    place = start + offset
    return tl.max_contiguous(tl.multiple_of(place, 16), 16) if CHUNKED else place


@triton.jit
def load_strides(row, INNER: tl.constexpr = 0):
    """Load the length of the inner axis and the strides of both axes; before a loop, which would load them again."""
    inner = tl.load(row + 3).to(tl.int32)  # 64-bit divisions are slow
    if INNER > 0:
        inner = inner * 0 + INNER
    return inner, tl.load(row + 1), tl.load(row + 2)


@triton.jit
def load_address(pointers, piece, which, kind: tl.constexpr, ALIGNED: tl.constexpr):
    """Load the address of a slice of the weights (`which` = 0) or of the gradients (1)."""
    pointer = tl.load(pointers + piece * 2 + which).to(tl.pointer_type(kind))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def load_sizes(row, ALIGNED: tl.constexpr):
    """Load the stride between heads and the number of elements of a head."""
    stride, size = tl.load(row), tl.load(row + 4).to(tl.int32)
    if ALIGNED:
        stride, size = tl.multiple_of(stride, 16), tl.multiple_of(size, 16)
    return stride, size


@triton.jit
def column_range(size, split, splits, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Compute the range of columns of one of several programs: its first column and its end."""
    length = tl.cdiv(tl.cdiv(size, splits), BLOCK) * BLOCK
    first = split * length
    last = tl.minimum(first + length, size)
    return first, tl.multiple_of(last, 16) if ALIGNED else last


@triton.jit
def load_block(
    base,
    start,
    last,
    heads,
    starts,
    inner,
    outer_stride,
    inner_stride,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    FLAT: tl.constexpr,
    CHUNKED: tl.constexpr,
):
    """Load a block of columns of all heads as float32 [MP, BLOCK], zero outside, and the mask of valid elements."""
    column = tl.multiple_of(start, BLOCK) + tl.arange(0, BLOCK)
    offset = element_indices(column, inner, outer_stride, inner_stride, FLAT)
    inside = (heads[:, None] < M) & (column[None, :] < last)
    place = block_offsets(starts, offset, CHUNKED)
    return tl.load(base + place, mask=inside, other=0.0).to(tl.float32), inside
