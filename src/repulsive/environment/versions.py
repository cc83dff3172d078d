"""Versions of packages that results depend on."""

from __future__ import annotations

import platform
from collections.abc import Sequence

from repulsive._version import __version__
from repulsive.environment.requirements import installed_version


def package_versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of this package, of Python, of those `packages` that are installed, and of torch's CUDA."""
    import torch

    result = {"repulsive": __version__, "python": platform.python_version()}
    result |= {name: version for name in packages if (version := installed_version(name)) is not None}
    return result | ({"cuda": torch.version.cuda} if torch.version.cuda else {})
