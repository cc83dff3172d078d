"""Triton kernel `step_noise_kernel`: Langevin noise that follows the optimizer's step, for every slice in one launch.

The formulas are those of `repulsion.optimizer_noise`. With xi standard normal, v the second moment and eta the distance
that one unit of gradient moves a weight,

    n = scale sqrt(1 / eta) xi    weight <- weight - step n    buffer <- buffer + kept n

For Adam and RMSprop, 1 / eta is proportional to d = sqrt(v) + eps, and step to 1 / d. With r = 1 / sqrt(d), the weight
moves by xi r times a number of the slice, and the buffer by xi d r (Adam) or xi r (RMSprop) times another one: one root
instead of a root and a quotient for each of them.

The numbers of a slice, float64 [slices, 8], are by MODE:

- ADAM: scale, lr, eps, log beta1, log beta2, 1 - beta1, ahead
- RMSPROP: scale, lr, eps, 0, log alpha, 1 - momentum, ahead
- SGD: scale sqrt(1 / eta), step, kept

The addresses, [slices, 4], are those of the weight, of v, of the buffer and of the number of optimizer steps. If the
last one is 0, that number is the step of the noise plus `ahead`.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from repulsive.repulsion.backends.triton_kernels.noise import standard_normal_block
from repulsive.repulsion.backends.triton_kernels.slices import (
    block_offsets,
    column_range,
    element_indices,
    load_sizes,
    load_strides,
)

ADAM, RMSPROP, SGD = 0, 1, 2  # MODE


@triton.jit
def _share(count, log_decay):
    """Compute 1 - decay ** count in float64, where it does not cancel."""
    return (1.0 - tl.exp(count * log_decay)).to(tl.float32)


@triton.jit
def step_noise_kernel(
    table,
    pointers,
    numbers,
    steps,
    M: tl.constexpr,
    MP: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    STATE: tl.constexpr,
    FLAT: tl.constexpr,
    INNER: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNKED: tl.constexpr,
    MODE: tl.constexpr,
    BUFFERED: tl.constexpr,
):
    """Add noise to the weights of every slice, and with BUFFERED to its momentum buffer."""
    piece, split = tl.program_id(0), tl.program_id(1)
    row, own = table + piece * COLUMNS, numbers + piece * 8
    head_stride, size = load_sizes(row, ALIGNED)
    theta = tl.load(pointers + piece * 4).to(tl.pointer_type(KIND))
    square = tl.load(pointers + piece * 4 + 1).to(tl.pointer_type(STATE))
    buffer = tl.load(pointers + piece * 4 + 2).to(tl.pointer_type(STATE))
    if ALIGNED:
        theta, square, buffer = tl.multiple_of(theta, 16), tl.multiple_of(square, 16), tl.multiple_of(buffer, 16)
    scale = tl.load(own).to(tl.float32)
    second, third = tl.load(own + 1).to(tl.float32), tl.load(own + 2).to(tl.float32)
    averaged, started, rest = 1.0, 1.0, tl.load(own + 5).to(tl.float32)
    if MODE != 2:
        counted = tl.load(pointers + piece * 4 + 3)
        count = tl.load(own + 6) + tl.load(steps).to(tl.float64)
        if counted != 0:
            count = tl.load(counted.to(tl.pointer_type(tl.float32))).to(tl.float64)
        averaged = _share(count, tl.load(own + 4))
        started = _share(count, tl.load(own + 3))
    if MODE == 0:
        scale *= tl.sqrt(averaged / second)
        of_weight, of_buffer = scale * second * rest / started, scale * rest
    elif MODE == 1:
        of_buffer = scale * tl.sqrt(averaged / second * rest)
        of_weight = of_buffer * second
    else:
        of_weight, of_buffer = scale * second, scale * third
    unbiased = 1.0 / averaged if MODE == 0 else 1.0
    heads = tl.arange(0, MP)
    first, last = column_range(size, split, SPLITS, BLOCK, ALIGNED)
    inner, outer_stride, inner_stride = load_strides(row, INNER)
    outer_element, inner_element = tl.load(row + 5), tl.load(row + 6)
    stream, step = tl.load(row + 8), tl.load(steps)
    for start in range(first, last, BLOCK):
        column = tl.multiple_of(start, BLOCK) + tl.arange(0, BLOCK)
        offset = element_indices(column, inner, outer_stride, inner_stride, FLAT)
        place = block_offsets(heads * head_stride, offset, CHUNKED)
        inside = (heads[:, None] < M) & (column[None, :] < last)
        element = element_indices(column, inner, outer_element, inner_element, FLAT)
        noise = standard_normal_block(stream, step, heads.to(tl.int64) * size, element)
        kept = of_buffer
        if MODE != 2:
            v = tl.load(square + place, mask=inside, other=0.0).to(tl.float32)
            divisor = tl.sqrt(v * unbiased) + third
            noise *= tl.where(v > 0, tl.rsqrt(divisor), 0.0)
            if MODE == 0:
                kept = of_buffer * divisor
        weight = tl.load(theta + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(theta + place, (weight - of_weight * noise).to(KIND), mask=inside)
        if BUFFERED:
            old = tl.load(buffer + place, mask=inside, other=0.0).to(tl.float32)
            tl.store(buffer + place, (old + kept * noise).to(STATE), mask=inside)
