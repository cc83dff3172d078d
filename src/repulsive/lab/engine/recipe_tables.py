"""Recipes as nested tables: read TOML files, apply changes, compare, and write TOML.

A recipe file states its difference from a parent: `extends = "parent.toml"`, relative to the file, or the name of a
built-in recipe. The parent is read first.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from repulsive.errors import ConfigError

PARENT = "extends"
Tables = dict[str, Any]


def read(path: Path, built_in: Callable[[str], Tables] | None = None, _children: tuple[Path, ...] = ()) -> Tables:
    """Read a TOML file, merged into the files that it extends.

    Args:
        path: the file.
        built_in: function that returns the tables of a built-in recipe, for a parent that is not a file.

    Raises:
        ConfigError: a file is missing, is not TOML, or extends itself.
    """
    here = Path(os.path.realpath(path))  # unlike Path.resolve, accepts links that lead to themselves
    if here in _children:
        raise ConfigError(f"{path}: extends itself, through {', '.join(p.name for p in _children)}")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors write a byte order mark
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:  # invalid TOML or UTF-8, a number too long, brackets nested too deep
        raise ConfigError(f"{path}: is not TOML: {error}") from None
    parent = tables.pop(PARENT, None)
    if parent is None:
        return tables
    if not isinstance(parent, str):
        raise ConfigError(f"{path}: {PARENT} must be a file or the name of a recipe, not {parent!r}")
    file = path.parent / parent
    if built_in is not None and not file.is_file():
        if not is_file_name(parent):
            try:
                return merge(built_in(parent), tables)
            except ConfigError as error:
                raise ConfigError(f"{path}: {PARENT}: {error}") from None
        file = Path(parent)
        if not file.is_file():
            raise ConfigError(f"{path}: {PARENT}: {parent}: no such file beside {path.name} or in this folder")
    return merge(read(file, built_in, (*_children, here)), tables)


def is_file_name(name: str | Path) -> bool:
    """Whether `name` is the path of a recipe file, not the name of a built-in recipe."""
    path = Path(name)
    return path.suffix == ".toml" or path.is_file()


def merge(base: Tables, over: Tables) -> Tables:
    """Merge two tables key by key; values of `over` win."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def apply_changes(tables: Tables, changes: Sequence[str]) -> Tables:
    """Apply `key=value` changes to the tables of a recipe, in place.

    Args:
        tables: the recipe.
        changes: such as "optimizer.lr=0.001"; values are TOML, bare words are strings.

    Raises:
        ConfigError: a change is not `key=value`, or its key lies below a value.
    """
    for change in changes:
        _apply(tables, change)
    return tables


def _apply(tables: Tables, change: str) -> None:
    name, equals, text = change.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"--set {change!r}: write it as key=value, such as optimizer.lr=0.001")
    value = parse_value(text)
    *parents, last = name.strip().split(".")
    for parent in parents:
        inner = tables.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {change!r}: {parent} is a value, not a table")
        tables = inner
    tables[last] = value


def parse_value(text: str) -> Any:
    """Parse the text after `key=`: a TOML value, or else a bare word."""
    try:
        tables = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text.strip()
    return tables["value"] if len(tables) == 1 else text.strip()  # text with a line feed may define another key


def flatten(tables: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Flatten nested tables: `{"model": {"heads": 3}}` -> `{"model.heads": 3}`."""
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        flat |= flatten(value, f"{above}{name}.") if isinstance(value, Mapping) else {f"{above}{name}": value}
    return flat


def differences(one: Mapping[str, Any], other: Mapping[str, Any], ignore: Collection[str] = ()) -> list[str]:
    """List the keys in which two recipes differ; an empty list means that they are the same recipe.

    Values are compared as JSON stores them, so that tables from a run folder equal those they were written from.

    Args:
        one: tables of a recipe, such as `as_tables` makes or a run folder keeps.
        other: tables of the other recipe.
        ignore: keys that do not matter, such as "data.folder".

    Example:
        >>> differences({"seed": 0, "model": {"heads": 3}}, {"seed": 1, "model": {"heads": 4}}, ignore=["seed"])
        ['model.heads']
    """
    first, second = (flatten(json.loads(json.dumps(tables))) for tables in (one, other))
    missing = object()
    keys = dict.fromkeys([*first, *second])
    return [key for key in keys if key not in ignore and first.get(key, missing) != second.get(key, missing)]


def as_toml(tables: Mapping[str, Any]) -> str:
    """Format nested tables as TOML. None values are left out, because TOML cannot represent them."""
    values = {key: value for key, value in tables.items() if not isinstance(value, Mapping) and value is not None}
    lines = [f"{key} = {_toml_value(value)}" for key, value in values.items()]
    for key, table in tables.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{key}]", as_toml(table).rstrip("\n")]
    return "\n".join(lines).lstrip("\n") + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    return str(value)
