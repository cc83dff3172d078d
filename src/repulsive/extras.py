"""Name the command that installs an extra, for error messages about missing packages."""

from __future__ import annotations

import tomllib
from pathlib import Path

NAME = "repulsive"
_CHECKOUT = Path(__file__).resolve().parents[2]  # the repository, if this module is imported from one


def checkout() -> Path | None:
    """Return the root of the repository that this package is imported from; None for an installed wheel."""
    project = _CHECKOUT / "pyproject.toml"
    try:
        is_ours = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["name"] == NAME
    except (OSError, KeyError, ValueError):
        return None
    return _CHECKOUT if is_ours else None


def install_command(extra: str) -> str:
    """Return the command that installs an extra: in a checkout, an editable install, to run in its root.

    A package index may not have the version of a checkout, or not have the package at all.
    """
    if checkout() is not None:
        return f"python -m pip install -e '.[{extra}]' -c constraints.txt"
    return f"python -m pip install '{NAME}[{extra}]'"
