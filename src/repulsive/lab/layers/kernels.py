"""Choose between Triton kernels and torch code: `REPULSIVE_KERNELS=eager|triton`; the default is Triton on CUDA."""

from __future__ import annotations

import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from repulsive.errors import ConfigError


def choice(device: str) -> bool:
    """Whether to use Triton kernels for tensors on this type of device.

    Raises:
        ConfigError: `REPULSIVE_KERNELS` is misspelt, or asks for Triton, which is not installed.
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
    """Whether Triton is installed, in a version that the kernels were tested with."""
    try:
        major, minor = version("triton").split(".")[:2]
    except PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= (3, 6)
