"""Find what other installed packages add to this one, by entry points.

| group | an entry point is |
| --- | --- |
| `repulsive.families` | a `Family`, or a list of them: layouts of attention classes |
| `repulsive.rules` | a function or class that returns a `Rule` without arguments |
| `repulsive.tasks` | a pair (recipe class, task class) |
| `repulsive.loggers` | a function or class that takes a `LoggedRun` and returns a logger |

Entry points are read when they are first needed, never when this package is imported. An entry point that fails is left
out with one warning, so that a broken package cannot stop a training that does not use it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points

FAMILIES, RULES, TASKS = "repulsive.families", "repulsive.rules", "repulsive.tasks"
LOGGERS = "repulsive.loggers"
GROUPS = (FAMILIES, RULES, TASKS, LOGGERS)


class PluginWarning(UserWarning):
    """An entry point of another package cannot be used."""


def list_plugins(group: str) -> list[EntryPoint]:
    """List the entry points of a group, sorted by name and package, without importing them."""
    return sorted(entry_points(group=group), key=lambda entry: (entry.name, package_of(entry)))


@cache
def load_plugins(group: str, problem_of: Callable[[str, object], str]) -> dict[str, object]:
    """Import the entry points of a group, once per process.

    Args:
        group: one of `GROUPS`.
        problem_of: takes a name and what its entry point refers to; returns "", or what is wrong with them.

    Returns:
        What the entry points refer to, by name. Those that fail, and second ones of the same name, are left out.

    Warns:
        PluginWarning: one line for each entry point that is left out. It names the package.
    """
    loaded: dict[str, object] = {}
    for entry in list_plugins(group):
        try:
            value = entry.load()
            problem = problem_of(entry.name, value)
        except Exception as error:  # the code of another package may raise anything
            problem = f"{type(error).__name__}: {error}"
        if not problem and entry.name in loaded:
            problem = "another package has an entry point of this name"
        if problem:
            package = package_of(entry)
            warnings.warn(
                f"the package {package!r} is ignored as a plugin: its entry point {entry.name!r} in {group} "
                f"({entry.value}) cannot be used: {' '.join(problem.split())}; update or uninstall {package}",
                PluginWarning,
                stacklevel=3,
            )
        else:
            loaded[entry.name] = value
    return loaded


def package_of(entry: EntryPoint) -> str:
    """Name of the distribution that declares an entry point."""
    return entry.dist.name if entry.dist is not None else "unknown"
