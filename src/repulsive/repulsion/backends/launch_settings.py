"""Launch settings of the fused update: programs per slice, columns per program, warps, precision.

They affect speed and rounding errors only. The tables have one entry per number of heads, padded to a power of two.
"""

from __future__ import annotations

from functools import cache

WAVES = 1  # parts of an update that are launched one after the other; see `waves`
STREAMS = 1  # streams for the waves
SPLITS = 16  # smallest number of programs per slice; a power of two
COMBINE_SPLITS = 0  # programs per slice of `combine`; 0 for as many as of `gram`
BUSY = 528  # programs that keep a large GPU busy; a few slices are split further to get as many
LEAST = 1024  # smallest number of elements of a head per program
BACKWARD = False  # whether programs of `combine` start with their last columns
PRECISION = "tf32x3"  # precision of matrix products; see `triton_kernels.products`

# Launch settings by number of heads, padded to a power of two: a program reads as many columns as registers hold.
GRAM: dict[int, dict[str, int]] = {
    2: {"BLOCK": 1024, "num_warps": 2},
    4: {"BLOCK": 512, "num_warps": 2},
    8: {"BLOCK": 128, "num_warps": 2},
    16: {"BLOCK": 64, "num_warps": 1},
    32: {"BLOCK": 64, "num_warps": 2, "num_stages": 3},
    64: {"BLOCK": 32, "num_warps": 4, "num_stages": 3},
}
SOLVE: dict[int, dict[str, int]] = {
    2: {"CHUNK": 16, "num_warps": 1},
    4: {"CHUNK": 16, "num_warps": 1},
    8: {"CHUNK": 16, "num_warps": 1},
    16: {"CHUNK": 1, "num_warps": 2},
    32: {"CHUNK": 1, "num_warps": 4},
    64: {"CHUNK": 1, "num_warps": 16},
}
COMBINE: dict[int, dict[str, int]] = {
    2: {"BLOCK": 2048, "num_warps": 4},
    4: {"BLOCK": 1024, "num_warps": 4},
    8: {"BLOCK": 256, "num_warps": 8},
    16: {"BLOCK": 256, "num_warps": 4, "num_stages": 3},
    32: {"BLOCK": 64, "num_warps": 4, "num_stages": 3},
    64: {"BLOCK": 32, "num_warps": 4, "num_stages": 1},
}
# Columns of a program that also draws noise: the code is unrolled for every element, and must stay short.
NOISY_BLOCK: dict[int, int] = {2: 512, 4: 512, 8: 256, 16: 64, 32: 32, 64: 32}


# Further settings of such a program, in place of those of COMBINE.
NOISY: dict[int, dict[str, int]] = {}


def combine_settings(padded: int, is_noisy: bool) -> dict[str, int]:
    """Choose the launch settings of `combine` for a padded number of heads."""
    if not is_noisy:
        return COMBINE[padded]
    return COMBINE[padded] | {"BLOCK": NOISY_BLOCK[padded]} | NOISY.get(padded, {})


@cache
def loads_ahead() -> bool:
    """Whether Triton's compiler can load blocks of three axes ahead in a loop; before version 3.3 it fails."""
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 3)


def splits_per_slice(slices: int, dim: int) -> int:
    """Choose the number of programs per slice."""
    splits = SPLITS
    while slices * splits < BUSY and dim >= 2 * splits * LEAST:
        splits *= 2
    return splits
