"""All known families: the rows of our own table, and rows that other packages add by entry points."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from repulsive.heads.table.families import FAMILIES, Family
from repulsive.plugins import FAMILIES as GROUP
from repulsive.plugins import load_plugins


@cache
def known_families() -> tuple[Family, ...]:
    """Our own rows, then those of other packages. Reads entry points on the first call."""
    added = load_plugins(GROUP, _problem_of)
    return (*FAMILIES, *(row for value in added.values() for row in _rows(value)))


def _rows(value: object) -> Sequence[Family]:
    return (value,) if isinstance(value, Family) else tuple(value) if isinstance(value, list | tuple) else ()


def _problem_of(name: str, value: object) -> str:
    rows = _rows(value)
    if not rows or not all(isinstance(row, Family) for row in rows):
        return f"expected a Family or a list of them, got {type(value).__name__}"
    ours = {row.name for row in FAMILIES}
    for row in rows:
        if row.name in ours:
            return f"the name {row.name!r} belongs to a built-in family; choose another"
        if row.generic or not row.package:
            return f"the family {row.name!r} needs the names of its classes and the package that defines them"
    return ""
