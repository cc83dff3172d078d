"""Counter-based normal noise in Triton: the numbers of `particles.noise`, in float32.

The 64-bit hash of (noise stream, step, element index) gives two uniform numbers u in (0, 1] and v in [0, 1]. The noise
is sqrt(-2 log u) cos(2 pi v), a standard normal number (Box-Muller transform), with the shape of the element indices.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

_GOLDEN = tl.constexpr(-7046029254386353131)
_MIX_1 = tl.constexpr(-4658895280553007687)
_MIX_2 = tl.constexpr(-7723592293110705685)


@triton.jit
def _mix(bits):
    """Hash 64 bits, by the finaliser of splitmix64."""
    bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * _MIX_1
    bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return bits ^ ((bits >> 31) & 0x1FFFFFFFF)


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
def standard_normal(stream, step, element):
    """Draw a standard normal number for each element index of a noise stream in a step."""
    key = _mix(stream + (step + 1) * _GOLDEN)
    bits = _mix(element * _GOLDEN + key)
    first = (((bits >> 32) & 0xFFFFFFFF).to(tl.float32) + 1) * 2.3283064365386963e-10
    second = (bits & 0xFFFFFFFF).to(tl.float32) * 2.3283064365386963e-10
    return tl.sqrt(-2 * tl.log(first)) * _cos_of_turn(second)
