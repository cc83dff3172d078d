"""Read the requirements of this package and its extras, and check which of them are installed."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from repulsive.extras import NAME, checkout

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[([^]]*)\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?")
_OTHER_NAMES = {"triton": "pytorch-triton"}  # nightly builds of torch install Triton under another name


@dataclass(frozen=True)
class Requirement:
    """A required package.

    Args:
        name: name of the distribution.
        extras: its extras that are required.
        oldest: the oldest supported version, such as "2.6"; "" for any.
    """

    name: str
    extras: tuple[str, ...] = ()
    oldest: str = ""


@dataclass(frozen=True)
class Package:
    """An installed or missing package.

    Args:
        name: name of the distribution.
        version: the installed version; None if it is not installed.
        problem: "" if the package satisfies its requirement, else what is wrong with it.
    """

    name: str
    version: str | None
    problem: str


@dataclass(frozen=True)
class Requirements:
    """What the package needs always (`required`) and for each extra (`extras`)."""

    required: tuple[Requirement, ...]
    extras: Mapping[str, tuple[Requirement, ...]]


def parse_requirement(text: str) -> tuple[Requirement, str] | None:
    """Parse one requirement, as `pyproject.toml` or the metadata of a wheel states it.

    Understands what this project uses: a lower bound, extras, and the markers `sys_platform == ...` and `extra == ...`.

    Returns:
        The requirement and the extra that it belongs to ("" for none); None if it is for another platform.

    Example:
        >>> parse_requirement("triton>=3.2; extra == 'fused'")
        (Requirement(name='triton', extras=(), oldest='3.2'), 'fused')
    """
    parts = _REQUIREMENT.fullmatch(text.strip())
    if parts is None:
        raise ValueError(f"cannot parse the requirement {text!r}")
    name, extras, versions, marker = (part or "" for part in parts.groups())
    platforms = re.findall(r"sys_platform\s*==\s*['\"](\w+)['\"]", marker)
    if platforms and sys.platform not in platforms:
        return None
    owner = re.search(r"extra\s*==\s*['\"]([\w.-]+)['\"]", marker)
    oldest = re.search(r">=\s*([\w.]+)", versions)
    words = tuple(word.strip() for word in extras.split(",") if word.strip())
    return Requirement(name, words, oldest[1] if oldest else ""), owner[1] if owner else ""


def read_requirements() -> Requirements:
    """Read the requirements from the repository, or from the metadata of the installed package.

    Both are empty if this package is neither installed nor part of a repository.
    """
    if (root := checkout()) is not None:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        tables: dict[str, Sequence[str]] = {"": project["dependencies"], **project["optional-dependencies"]}
        lines = [(text, extra) for extra, texts in tables.items() for text in texts]
    else:
        try:
            lines = [(text, "") for text in metadata.requires(NAME) or ()]
        except metadata.PackageNotFoundError:
            lines = []
    extras: dict[str, list[Requirement]] = {}
    for text, table in lines:
        if (parsed := parse_requirement(text)) is not None:
            extras.setdefault(table or parsed[1], []).append(parsed[0])
    required = tuple(extras.pop("", ()))
    return Requirements(required, {name: tuple(extras[name]) for name in extras})


def resolve(extra: str, extras: Mapping[str, Sequence[Requirement]]) -> list[Requirement]:
    """List all requirements of an extra, with those of the extras it includes, each package once."""
    result: dict[str, Requirement] = {}
    waiting, done = [extra], set()
    while waiting:
        name = waiting.pop(0)
        if name in done:
            continue
        done.add(name)
        for requirement in extras.get(name, ()):
            if requirement.name == NAME:
                waiting += requirement.extras
            else:
                result.setdefault(requirement.name, requirement)
    return list(result.values())


def check_package(requirement: Requirement) -> Package:
    """Look up the installed version of a package and compare it with the requirement. Imports nothing."""
    name, oldest = requirement.name, requirement.oldest
    version = installed_version(name)
    if version is None:
        return Package(name, None, "missing")
    if oldest and _numbers(version) < _numbers(oldest):
        return Package(name, version, f"too old, needs {oldest} or newer")
    return Package(name, version, "")


def installed_version(name: str) -> str | None:
    """The installed version of a distribution; None without it."""
    for candidate in (name, _OTHER_NAMES.get(name, name)):
        try:
            return metadata.version(candidate)
        except metadata.PackageNotFoundError:
            continue
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """`"2.13.0+cpu"` -> (2, 13, 0)."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()
