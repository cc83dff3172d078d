"""Whether models use their Triton kernels: `REPULSIVE_KERNELS=eager|triton`, by default on CUDA."""

from __future__ import annotations

import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from repulsive.errors import ConfigError


def choice(device: str) -> bool:
    """Whether tensors on this type of device go through Triton.

    Raises:
        ConfigError: `REPULSIVE_KERNELS` is misspelt, or asks for Triton where there is none.
    """
    asked = os.environ.get("REPULSIVE_KERNELS", "")
    if asked not in ("", "eager", "triton"):
        raise ConfigError(f"REPULSIVE_KERNELS={asked!r}: choose eager or triton")
    if asked == "eager" or (asked == "" and device != "cuda"):
        return False
    if not has_triton():
        if asked == "triton":
            raise ConfigError("REPULSIVE_KERNELS=triton, but the package triton, 3.6 or newer, is not installed")
        return False
    return device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


@cache
def has_triton() -> bool:
    """Whether Triton is there, as new as the kernels were tested with."""
    try:
        major, minor = version("triton").split(".")[:2]
    except PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= (3, 6)
