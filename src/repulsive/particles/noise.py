"""Counter-based normal noise: the same (seed, step, group, element) gives the same number on every rank.

Ranks that hold copies of a weight draw equal noise, a rank that holds a shard draws the noise of its own elements, and
a resumed run draws the same noise as an uninterrupted run.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed 64-bit number (splitmix64's increment)
_MIX_1 = -4658895280553007687  # 0xbf58476d1ce4e5b9
_MIX_2 = -7723592293110705685  # 0x94d049bb133111eb


def key(seed: int, step: int, name: str) -> int:
    """Compute the signed 64-bit key of one group's noise in one step."""
    return at_step(stream(seed, name), step)


def stream(seed: int, name: str) -> int:
    """Hash seed and group name to the signed 64-bit key of the group's noise stream, which all steps share."""
    return _signed(int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little"))


def at_step(noise_stream: int, step: int) -> int:
    """Mix a step into the key of a noise stream, by splitmix64's finaliser in plain integers."""
    bits = (noise_stream + (step + 1) * _GOLDEN) % 2**64
    bits = ((bits ^ (bits >> 30)) * _MIX_1) % 2**64
    bits = ((bits ^ (bits >> 27)) * _MIX_2) % 2**64
    return _signed(bits ^ (bits >> 31))


def normal(
    noise_key: int, elements: Tensor | int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Tensor:
    """Draw standard normal numbers, one per element index.

    Each index is hashed to 64 bits by splitmix64's finaliser; the two halves feed one Box-Muller transform.

    Args:
        noise_key: from `key`.
        elements: element indices (int64), or n for 0 ... n - 1.
        dtype: dtype of the result.
        device: device of the result, if `elements` is a number.

    Returns:
        A tensor with the shape of `elements`.
    """
    index = torch.arange(elements, device=device) if isinstance(elements, int) else elements.to(torch.int64)
    bits = index * _GOLDEN  # overflows as splitmix64 does; in place, because memory takes most of the time on a CPU
    bits += noise_key
    for by, factor in ((30, _MIX_1), (27, _MIX_2)):
        bits ^= _shift(bits, by)
        bits *= factor
    bits ^= _shift(bits, 31)
    wide = torch.float32 if index.device.type == "mps" else torch.float64
    first = _shift(bits, 32).to(wide).add_(1).div_(2**32)  # (0, 1]: the logarithm is finite
    second = bits.bitwise_and_(0xFFFFFFFF).to(wide).div_(2**32)
    radius = first.log_().mul_(-2).sqrt_()
    return radius.mul_(second.mul_(2 * math.pi).cos_()).to(dtype)


def _shift(bits: Tensor, by: int) -> Tensor:
    """Shift bits right logically, filling with zeros; torch's `>>` keeps the sign."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits
