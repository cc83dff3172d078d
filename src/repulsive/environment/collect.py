"""Gather the facts about an installation."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from repulsive._version import __version__
from repulsive.environment.requirements import (
    Package,
    Requirement,
    check_package,
    installed_version,
    read_requirements,
    resolve,
)
from repulsive.errors import ConfigError, short_message
from repulsive.extras import NAME, install_command
from repulsive.plugins import GROUPS, list_plugins, package_of
from repulsive.triton_setting import use_triton

PREFIX = "REPULSIVE_"


@dataclass(frozen=True)
class Torch:
    """The installed torch.

    Args:
        version: None if torch is missing or cannot be imported.
        cuda: version of CUDA (or ROCm) it was built with; None for a build without.
        cudnn: version of cuDNN; None without.
        devices: a line for each accelerator; empty if there is only the CPU.
        error: why it cannot be imported; "" if it can.
    """

    version: str | None = None
    cuda: str | None = None
    cudnn: str | None = None
    devices: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Triton:
    """The installed Triton, and whether updates run in Triton kernels; `reason` says why, or why not."""

    version: str | None
    used: bool
    reason: str


@dataclass(frozen=True)
class Extra:
    """An extra: the packages it adds, other extras it includes, and the command that installs what is missing.

    Args:
        name: such as "train".
        packages: packages it names itself.
        includes: names of extras it includes.
        missing: packages that are missing or too old, those of included extras as well.
        install: the command that installs it; "" if nothing is missing.
    """

    name: str
    packages: tuple[Package, ...]
    includes: tuple[str, ...]
    missing: tuple[Package, ...]
    install: str


@dataclass(frozen=True)
class Plugin:
    """An entry point of another package: its group, its name, and the package that declares it."""

    group: str
    name: str
    package: str


@dataclass(frozen=True)
class Environment:
    """Everything that `repulsive doctor` prints.

    Args:
        version: of this package.
        location: folder that it is imported from.
        python: version of Python.
        executable: path of Python.
        platform: operating system and architecture.
        required: the packages that it always needs.
        torch: torch and its devices.
        triton: Triton and whether it is used.
        variables: environment variables of this package that are set.
        extras: all extras.
        plugins: entry points of other packages; they are not imported.
        torchvision: why this package, which transformers and timm import, does not work; "" if it does, or is missing.
    """

    version: str
    location: str
    python: str
    executable: str
    platform: str
    required: tuple[Package, ...]
    torch: Torch
    triton: Triton
    variables: dict[str, str]
    extras: tuple[Extra, ...]
    plugins: tuple[Plugin, ...]
    torchvision: str = ""

    @property
    def problems(self) -> list[str]:
        """One line for each package that is required and missing or too old, or that breaks others."""
        required = [f"{package.name}: {package.problem}" for package in self.required if package.problem]
        return [*required, f"torchvision: {self.torchvision}"] if self.torchvision else required


def collect() -> Environment:
    """Gather the facts. Imports torch and torchvision if they are there; other packages are looked up only."""
    requirements = read_requirements()
    torch = _torch()
    needed = requirements.required or (Requirement("torch"),)  # without metadata, torch is still needed
    required = tuple(check_package(requirement) for requirement in needed)
    if torch.error:  # the metadata may be there although the import fails
        required = tuple(
            replace(package, problem=f"cannot be imported: {torch.error}")
            if package.name == "torch" and package.version is not None
            else package
            for package in required
        )
    extras = []
    for name, lines in requirements.extras.items():
        packages = (check_package(requirement) for requirement in resolve(name, requirements.extras))
        missing = tuple(package for package in packages if package.problem)
        own = tuple(check_package(requirement) for requirement in lines if requirement.name != NAME)
        includes = tuple(extra for requirement in lines if requirement.name == NAME for extra in requirement.extras)
        extras.append(Extra(name, own, includes, missing, install_command(name) if missing else ""))
    return Environment(
        version=__version__,
        location=str(Path(__file__).resolve().parents[1]),
        python=platform.python_version(),
        executable=sys.executable,
        platform=platform.platform(),
        required=required,
        torch=torch,
        triton=_triton(torch),
        variables={name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIX)},
        extras=tuple(extras),
        plugins=tuple(
            Plugin(group, entry.name, package_of(entry)) for group in GROUPS for entry in list_plugins(group)
        ),
        torchvision=_torchvision(torch),
    )


def _torchvision(torch: Torch) -> str:
    """Return why an installed torchvision cannot be imported: one for another torch breaks transformers, too."""
    version = installed_version("torchvision")
    if version is None or torch.version is None:
        return ""
    try:
        importlib.import_module("torchvision")
    except Exception as error:
        reason = short_message(error)
        return f"{version} cannot be imported with torch {torch.version} ({reason}); install the version for this torch"
    return ""


def _torch() -> Torch:
    try:
        import torch
    except Exception as error:  # a broken installation raises anything: OSError for a missing library, for example
        first = (str(error).splitlines() or [""])[0]
        return Torch(error=f"{type(error).__name__}: {first}".rstrip(": "))
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    devices = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            size = f"{facts.total_memory / 2**30:.0f} GiB"
            devices.append(f"cuda:{index} {facts.name}, {size}, capability {facts.major}.{facts.minor}")
    if torch.backends.mps.is_available():
        devices.append("mps")
    return Torch(
        version=str(torch.__version__),
        cuda=torch.version.cuda or torch.version.hip,
        cudnn=None if cudnn is None else str(cudnn),
        devices=tuple(devices),
    )


def _triton(torch: Torch) -> Triton:
    version = installed_version("triton")
    device = "cuda" if any(line.startswith("cuda") for line in torch.devices) else "cpu"
    try:
        used = use_triton(device)
    except ConfigError as error:
        return Triton(version, False, str(error))
    setting = os.environ.get(f"{PREFIX}KERNELS", "")
    if setting:
        reason = f"{PREFIX}KERNELS={setting}"
    elif device == "cpu":
        reason = "no CUDA device"
    else:
        reason = "a CUDA device" if used else "Triton is not installed"
    return Triton(version, used, reason)
