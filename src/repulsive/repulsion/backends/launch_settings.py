"""Launch settings of the fused update: programs per slice, columns per program, warps, precision.

They affect speed and rounding errors only. The tables have one entry per number of heads, padded to a power of two.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

LAUNCHES = ("gram", "combine", "combine with noise", "step noise")  # those that split slices
SPLITS = 16  # smallest number of programs per slice; a power of two
BUSY = 528  # programs that keep a large GPU busy; a few slices are split further to get as many
LEAST = 1024  # smallest number of elements of a head per program

# Programs per multiprocessor in place of SPLITS and BUSY, where they were measured (`studies.speed.kernels`, H200).
PROGRAMS: dict[int, dict[str, int]] = {16: {"gram": 11, "combine": 6, "combine with noise": 10, "step noise": 10}}
# Precision of matrix products, see `triton_kernels.products`; "tf32x3" where nothing else was measured.
PRECISION: dict[int, str] = {16: "split"}

# Launch settings by number of heads, padded to a power of two: a program reads as many columns as registers hold.
GRAM: dict[int, dict[str, int]] = {
    2: {"BLOCK": 1024, "num_warps": 2},
    4: {"BLOCK": 512, "num_warps": 2},
    8: {"BLOCK": 128, "num_warps": 2},
    16: {"BLOCK": 64, "num_warps": 1, "num_stages": 3},
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
    16: {"BLOCK": 128, "num_warps": 2, "num_stages": 2},
    32: {"BLOCK": 64, "num_warps": 4, "num_stages": 3},
    64: {"BLOCK": 32, "num_warps": 4, "num_stages": 1},
}
# Columns of a program that also draws noise: the code is unrolled for every element, and must stay short.
NOISY_BLOCK: dict[int, int] = {2: 512, 4: 512, 8: 256, 16: 64, 32: 32, 64: 32}
# Further settings of such a program, in place of those of COMBINE.
NOISY: dict[int, dict[str, int]] = {16: {"BLOCK": 32, "num_warps": 2, "num_stages": 3}}
# Launches whose products are sums in registers (`triton_kernels.columns`) in place of those on tensor cores, by padded
# number of heads: their settings, the programs per multiprocessor, and the largest number of heads that use them.
# Measured with 12 heads; with more of them the sums need more registers.
BY_COLUMN: dict[int, dict[str, dict[str, int]]] = {
    16: {
        "gram": {"BLOCK": 512, "num_warps": 4, "programs": 3, "WIDTH": 4, "most_heads": 12},
        "combine": {"BLOCK": 256, "num_warps": 2, "programs": 6, "WIDTH": 4, "UNROLL": 3, "most_heads": 12},
        "combine with noise": {"BLOCK": 128, "num_warps": 1, "programs": 12, "WIDTH": 4, "UNROLL": 1, "most_heads": 12},
    }
}
_NOT_KERNEL_SETTINGS = ("programs", "most_heads")


def pad_heads(heads: int) -> int:
    """Return the number of heads, padded to a power of two."""
    return max(2, 1 << (heads - 1).bit_length())


def column_settings(launch: str, heads: int) -> dict[str, int] | None:
    """Choose the settings of a launch that keeps columns in registers; None for a launch with the tables above.

    Args:
        launch: "gram", "combine" or "combine with noise".
        heads: number of heads.
    """
    settings = BY_COLUMN.get(pad_heads(heads), {}).get(launch)
    if settings is None or heads > settings.get("most_heads", heads) or not has_tuples():
        return None
    return {name: value for name, value in settings.items() if name not in _NOT_KERNEL_SETTINGS}


def kernel_settings(launch: str, heads: int) -> tuple[bool, dict[str, Any]]:
    """Choose the Triton kernel of a launch and its settings.

    Args:
        launch: "gram", "combine" or "combine with noise".
        heads: number of heads.

    Returns:
        Whether the kernel keeps columns in registers, and the settings.
    """
    settings = column_settings(launch, heads)
    if settings is not None:
        return True, settings
    padded = pad_heads(heads)
    sizes = GRAM[padded] if launch == "gram" else combine_settings(padded, launch == "combine with noise")
    return False, {**sizes, "PRECISION": precision(padded)}


def combine_settings(padded: int, is_noisy: bool) -> dict[str, int]:
    """Choose the launch settings of `combine` for a padded number of heads."""
    if not is_noisy:
        return COMBINE[padded]
    return COMBINE[padded] | {"BLOCK": NOISY_BLOCK[padded]} | NOISY.get(padded, {})


@cache
def _triton_version() -> tuple[int, ...]:
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2]))


def loads_ahead() -> bool:
    """Whether Triton's compiler can load blocks of three axes ahead in a loop; before version 3.3 it fails."""
    return _triton_version() >= (3, 3)


def has_tuples() -> bool:
    """Whether Triton has tuples of tensors."""
    return _triton_version() >= (3, 3)


def precision(padded: int) -> str:
    """Choose the precision of matrix products for a padded number of heads."""
    return PRECISION.get(padded, "tf32x3")


def splits_per_slice(launch: str, slices: int, dim: int, heads: int, device: torch.device) -> int:
    """Choose the number of programs per slice.

    Args:
        launch: "gram", "combine", "combine with noise" or "step noise".
        slices: number of slices.
        dim: elements of a head.
        heads: number of heads.
        device: where the update runs; the interpreter on a CPU counts as one multiprocessor.
    """
    programs = PROGRAMS.get(pad_heads(heads), {}).get(launch)
    if column_settings(launch, heads) is not None:
        programs = BY_COLUMN[pad_heads(heads)][launch]["programs"]
    if programs is not None:
        return max(1, min(programs * _multiprocessors(device) // slices, dim // LEAST))
    splits = SPLITS
    while slices * splits < BUSY and dim >= 2 * splits * LEAST:
        splits *= 2
    return splits


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
