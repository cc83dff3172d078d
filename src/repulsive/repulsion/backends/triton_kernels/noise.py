"""Counter-based normal noise in Triton: the numbers of `particles.noise`, in float32.

The 64-bit hash of (noise stream, step, element index) gives two uniform numbers u in (0, 1] and v in [0, 1]. The noise
is sqrt(-2 log u) cos(2 pi v), a standard normal number (Box-Muller transform), with the shape of the element indices.

Noise is bound by arithmetic, so the code is kept short. Hashes are unsigned, because a signed shift needs a mask, and
halves of a hash are 32-bit numbers before they are converted, because conversions from 64 bits are slow.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # constants of splitmix64
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(bits):
    """Hash unsigned 64-bit numbers, by the finaliser of splitmix64."""
    bits = (bits ^ (bits >> 30)) * _MIX_1
    bits = (bits ^ (bits >> 27)) * _MIX_2
    return bits ^ (bits >> 31)


@triton.jit
def _cos_of_turn(turn):
    """Compute cos(2 pi turn) for a turn in [0, 1], with an error below 3e-7.

    The angle is folded to a quarter turn, where a few terms of the Taylor series are enough. `tl.cos` takes any angle,
    and its code for large ones made the kernel several times as long.
    """
    half = tl.abs(turn - 0.5)  # cos(2 pi turn) = -cos(2 pi half)
    angle = 6.283185307179586 * tl.minimum(half, 0.5 - half)  # in [0, pi / 2]
    x = angle * angle
    series = 1.0 / 479001600 * x - 1.0 / 3628800
    series = series * x + 1.0 / 40320
    series = series * x - 1.0 / 720
    series = series * x + 1.0 / 24
    series = series * x - 1.0 / 2
    series = series * x + 1.0
    return tl.where(half < 0.25, -series, series)


@triton.jit
def _transform(bits):
    """Compute one standard normal number from each 64-bit hash."""
    first = ((bits >> 32).to(tl.uint32).to(tl.float32) + 1) * 2.3283064365386963e-10
    second = bits.to(tl.uint32).to(tl.float32) * 2.3283064365386963e-10
    return tl.sqrt(-2 * tl.log(first)) * _cos_of_turn(second)


@triton.jit
def _key(stream, step):
    """Mix a step into the key of a noise stream."""
    return _mix(stream.to(tl.uint64) + (step + 1).to(tl.uint64) * _GOLDEN)


@triton.jit
def standard_normal(stream, step, element):
    """Draw a standard normal number for each element index of a noise stream in a step."""
    return _transform(_mix(element.to(tl.uint64) * _GOLDEN + _key(stream, step)))


@triton.jit
def standard_normal_block(stream, step, start, element):
    """Draw a standard normal number for each index start[i] + element[j], [starts, elements].

    The products of the hash are formed before the sum, so there are as many as rows and columns, not as numbers.
    """
    rows = start.to(tl.uint64) * _GOLDEN + _key(stream, step)
    return _transform(_mix(rows[:, None] + (element.to(tl.uint64) * _GOLDEN)[None, :]))
