"""Build dataclasses from nested tables; every error names the key, the expected type and the value found."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from repulsive.errors import ConfigError

T = TypeVar("T")


def build(kind: type[T], tree: Mapping[str, Any], *, source: str = "config") -> T:
    """Build a dataclass from nested tables.

    Args:
        kind: the dataclass.
        tree: values of the fields; nested tables become dataclasses too.
        source: start of every error message, such as the name of the recipe.

    Raises:
        ConfigError: a key is unknown or missing, or a value has the wrong type or is out of range.
    """
    return typing.cast(T, _convert(kind, dict(tree), source))


def as_tables(config: Any) -> dict[str, Any]:
    """Convert a dataclass back to nested tables of plain values, for JSON and for comparison."""
    return {key: _plain(value) for key, value in dataclasses.asdict(config).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _convert(kind: Any, value: Any, place: str) -> Any:
    """Convert `value` to the type `kind`, or raise an error that starts with `place`."""
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _fill(kind, value, place)
    if origin in (typing.Union, types.UnionType):
        return _convert_to_any(options, value, place)
    if origin is typing.Literal:
        if value in options and any(type(value) is type(option) for option in options):
            return value
        raise ConfigError(f"{place}: must be one of {', '.join(map(str, options))}{_suggest(value, options)}")
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
        raise ConfigError(f"{place}: must be a number, not nan")
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    if kind is type(None) and value is None:
        return None
    if kind is int and isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{place}: must fit into 64 bits, and this number has {value.bit_length()}")
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
            raise ConfigError(f"{place}: unknown key {key!r}{_suggest_key(key, hints, list(known))}")
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
    except ValueError as error:  # raised by the dataclass's own checks
        raise ConfigError(f"{place}: {error}") from None


def _convert_to_any(options: Sequence[Any], value: Any, place: str) -> Any:
    """Convert `value` to the first of several types that takes it."""
    errors = []
    for option in options:
        try:
            return _convert(option, value, place)
        except ConfigError as error:
            errors.append(str(error))
    raise ConfigError(errors[0] if len(errors) == 1 else " or ".join(dict.fromkeys(errors)))


def _suggest_key(word: str, hints: Mapping[str, Any], known: Sequence[str]) -> str:
    """Suggest a similar key, or the same key inside one of the tables, or else list all keys."""
    inner = [
        f"{name}.{field.name}"
        for name in known
        if dataclasses.is_dataclass(hints[name])
        for field in dataclasses.fields(hints[name])
    ]
    same = [path for path in inner if path.rpartition(".")[2] == word]
    if same:
        return f"; did you mean {' or '.join(map(repr, same))}?"
    return _suggest(word, known)


def _suggest(word: object, known: Sequence[Any]) -> str:
    close = difflib.get_close_matches(str(word), [str(k) for k in known], n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(map(str, known))}"
