"""The environment variable `REPULSIVE_KERNELS`, which chooses between plain torch and Triton kernels.

| value | effect |
| --- | --- |
| not set, or empty | Triton kernels on CUDA devices if Triton is installed, plain torch elsewhere |
| `eager` | plain torch everywhere |
| `triton` | Triton kernels, or an error where they cannot run |
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from repulsive.errors import ConfigError

VARIABLE = "REPULSIVE_KERNELS"


def use_triton(device_type: str, *, oldest: tuple[int, int] = (0, 0)) -> bool:
    """Decide whether tensors on a device go through Triton kernels.

    Args:
        device_type: such as "cuda" or "cpu".
        oldest: the oldest version of Triton, (major, minor), that the kernels work with.

    Raises:
        ConfigError: the variable has an unknown value, or asks for Triton where it cannot run.
    """
    requested = _requested()
    if requested == "eager" or (requested == "" and device_type != "cuda"):
        return False
    installed = _triton_version()
    if installed is None or installed < oldest:
        if requested == "triton":
            newer = f", version {oldest[0]}.{oldest[1]} or newer," if oldest > (0, 0) else ""
            raise ConfigError(f"{VARIABLE}=triton, but the package triton{newer} is not installed")
        return False
    if device_type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return True
    raise ConfigError(
        f"{VARIABLE}=triton needs tensors on a CUDA device, not on {device_type}; unset it, or set TRITON_INTERPRET=1 "
        "to use Triton's interpreter"
    )


def is_triton_requested() -> bool:
    """Whether the user asked for Triton kernels, instead of leaving the choice to the package.

    Raises:
        ConfigError: the variable has an unknown value.
    """
    return _requested() == "triton"


def _requested() -> str:
    requested = os.environ.get(VARIABLE, "")
    if requested not in ("", "eager", "triton"):
        raise ConfigError(f"{VARIABLE}={requested!r}: choose eager or triton")
    return requested


@cache
def _triton_version() -> tuple[int, int] | None:
    """The installed version of Triton as (major, minor); None without it, (0, 0) if the version is unknown."""
    if find_spec("triton") is None:
        return None
    for package in ("triton", "pytorch-triton"):  # the latter comes with nightly builds of torch
        with suppress(PackageNotFoundError):
            major, minor = version(package).split(".")[:2]
            return int(major), int(minor)
    return 0, 0
