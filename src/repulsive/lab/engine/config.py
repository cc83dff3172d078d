"""Recipes: TOML files that fill dataclasses. An unknown key, a wrong type, a missing file: an error that names it.

A recipe is a difference from its parent: `extends = "parent.toml"` (relative to the file) is read first.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from repulsive.errors import ConfigError

T = TypeVar("T")
PARENT = "extends"


def load(kind: type[T], path: Path, changes: Sequence[str] = ()) -> T:
    """A dataclass from a TOML file and `key=value` changes.

    Args:
        kind: the dataclass to fill.
        path: the recipe.
        changes: such as "optimizer.lr=0.001"; values are TOML, bare words are strings.

    Raises:
        ConfigError: the file is missing or no TOML, or something in it does not fit `kind`.
    """
    return build(kind, changed(read(path), changes), source=str(path))


def changed(tree: dict[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """The tables of a recipe with `key=value` changes made."""
    for change in changes:
        _set(tree, change)
    return tree


def read(path: Path, resolve: Callable[[str], Path] | None = None, _children: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The table of a TOML file, laid over those it extends.

    Args:
        path: the file.
        resolve: finds a parent that is no file beside it, by its name.
    """
    here = Path(os.path.realpath(path))  # `resolve` does not take links that lead to themselves
    if here in _children:
        raise ConfigError(f"{path}: extends itself, by way of {', '.join(p.name for p in _children)}")
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, a number too long, brackets too deep
        raise ConfigError(f"{path}: is not TOML: {error}") from None
    parent = tree.pop(PARENT, None)
    if parent is None:
        return tree
    if not isinstance(parent, str):
        raise ConfigError(f"{path}: {PARENT} must be the name of a file, not {parent!r}")
    file = path.parent / parent
    if resolve is not None and not file.is_file():
        file = resolve(parent)
    return _merge(read(file, resolve, (*_children, here)), tree)


def parse_value(text: str) -> Any:
    """What stands behind `key=`: TOML, or a bare word."""
    try:
        tree = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text.strip()
    return tree["value"] if len(tree) == 1 else text.strip()  # a line feed may start another key


def build(kind: type[T], tree: Mapping[str, Any], *, source: str = "config") -> T:
    """A dataclass from nested tables, checked key by key."""
    return typing.cast(T, _convert(kind, dict(tree), source))


def as_tables(config: Any) -> dict[str, Any]:
    """Back to nested tables of plain values, for JSON and comparison."""
    return {key: _plain(value) for key, value in dataclasses.asdict(config).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _set(tree: dict[str, Any], change: str) -> None:
    name, equals, text = change.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"--set {change!r}: write it as key=value, such as optimizer.lr=0.001")
    value = parse_value(text)
    *tables, last = name.strip().split(".")
    for table in tables:
        inner = tree.setdefault(table, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {change!r}: {table} is a value, not a table")
        tree = inner
    tree[last] = value


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _convert(kind: Any, value: Any, place: str) -> Any:
    """`value` as `kind`, or an error that names the place, what was expected and what is there."""
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _fill(kind, value, place)
    if origin in (typing.Union, types.UnionType):
        return _first(options, value, place)
    if origin is typing.Literal:
        if value in options and any(type(value) is type(option) for option in options):
            return value
        raise ConfigError(f"{place}: must be one of {', '.join(map(str, options))}{_near(value, options)}")
    if origin in (tuple, list):
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{place}: must be a list, not {value!r}")
        kinds = options[:1] * len(value) if origin is list or options[1:] == (...,) else options
        if len(kinds) != len(value):
            raise ConfigError(f"{place}: must have {len(kinds)} entries, not {len(value)}")
        return origin(_convert(k, v, f"{place}[{i}]") for i, (k, v) in enumerate(zip(kinds, value, strict=True)))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is float and isinstance(value, float) and value != value:
        raise ConfigError(f"{place}: must be a number, and nan is none")
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    if kind is type(None) and value is None:
        return None
    if kind is int and isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{place}: is a number of {len(hex(value)) * 4} bits; nothing here takes more than 64")
    if isinstance(kind, type) and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise ConfigError(f"{place}: must be {getattr(kind, '__name__', kind)}, not {value!r}")


def _fill(kind: Any, value: Any, place: str) -> Any:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{place}: must be a table, not {value!r}")
    hints = typing.get_type_hints(kind)
    known = {field.name: field for field in dataclasses.fields(kind) if field.init}
    for key in value:
        if key not in known:
            raise ConfigError(f"{place}: unknown key {key!r}{_near_key(key, hints, list(known))}")
    missing = [
        name
        for name, field in known.items()
        if name not in value and field.default is field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{place}: {', '.join(missing)} must be given")
    try:
        return kind(**{key: _convert(hints[key], item, f"{place}: {key}") for key, item in value.items()})
    except ConfigError:
        raise
    except ValueError as error:  # a check of the dataclass itself
        raise ConfigError(f"{place}: {error}") from None


def _first(options: Sequence[Any], value: Any, place: str) -> Any:
    errors = []
    for option in options:
        try:
            return _convert(option, value, place)
        except ConfigError as error:
            errors.append(str(error))
    raise ConfigError(errors[0] if len(errors) == 1 else " or ".join(dict.fromkeys(errors)))


def _near_key(word: str, hints: Mapping[str, Any], known: Sequence[str]) -> str:
    """A key that is nearly the same, or the same in one of the tables below, else all there are."""
    below = [
        f"{name}.{field.name}"
        for name in known
        if dataclasses.is_dataclass(hints[name])
        for field in dataclasses.fields(hints[name])
    ]
    same = [path for path in below if path.rpartition(".")[2] == word]
    if same:
        return f"; did you mean {' or '.join(map(repr, same))}?"
    return _near(word, known)


def _near(word: object, known: Sequence[Any]) -> str:
    close = difflib.get_close_matches(str(word), [str(k) for k in known], n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(map(str, known))}"
