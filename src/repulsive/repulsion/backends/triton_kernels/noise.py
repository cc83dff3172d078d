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
def _square_of_radius(number):
    """Compute -2 log(number / 2^32) for a float32 number in [1, 2^32], with a relative error below 2e-7.

    With number = 2^e (1 + f) and f in [-1/3, 1/3), log(number) = e log 2 + f + f^2 p(f), where p is a polynomial.
    `tl.log` also handles numbers that do not occur here, which takes half as many instructions again.
    """
    bits = number.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F2AAAAB) & -0x800000  # of number / (2 / 3), in the bits of an exponent
    f = (bits - exponent).to(tl.float32, bitcast=True) - 1
    p = -0.27973413467407227 * f + 0.3070657253265381  # -2 p(f), by a Chebyshev fit
    p = p * f - 0.28010401129722595
    p = p * f + 0.32846522331237793
    p = p * f - 0.40020936727523804
    p = p * f + 0.5001474022865295
    p = p * f - 0.6666643023490906
    p = p * f + 0.9999988675117493
    of_fraction = p * (f * f) - 2 * f
    octaves = exponent.to(tl.float32) * 1.1920928955078125e-07 - 32  # e - 32, without error
    return of_fraction - 1.3862943611198906 * octaves


@triton.jit
def _transform(bits):
    """Compute one standard normal number from each 64-bit hash."""
    square = _square_of_radius((bits >> 32).to(tl.uint32).to(tl.float32) + 1)
    turn = bits.to(tl.uint32).to(tl.float32) * 2.3283064365386963e-10
    return tl.sqrt(square) * _cos_of_turn(turn)


@triton.jit
def _key(stream, step):
    """Mix a step into the key of a noise stream."""
    return _mix(stream.to(tl.uint64) + (step + 1).to(tl.uint64) * _GOLDEN)


@triton.jit
def standard_normal_block(stream, step, start, element):
    """Draw a standard normal number for each index start[i] + element[j], [starts, elements].

    The products of the hash are formed before the sum, so there are as many as rows and columns, not as numbers.
    """
    rows = start.to(tl.uint64) * _GOLDEN + _key(stream, step)
    return _transform(_mix(rows[:, None] + (element.to(tl.uint64) * _GOLDEN)[None, :]))


@triton.jit
def standard_normal(stream, step, start, element):
    """Draw a standard normal number for each index start + element[j], [elements], as `standard_normal_block`."""
    row = start.to(tl.uint64) * _GOLDEN + _key(stream, step)
    return _transform(_mix(row + element.to(tl.uint64) * _GOLDEN))
