"""Two systems' texts: reading them, and which two belong together."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repulsive.errors import DataError

Source = list[tuple[str, list[str]]]  # what a text was made from: (label or "", lines)


@dataclass(frozen=True)
class Text:
    """One line of a system's file.

    Args:
        text: what the system wrote.
        source: what it was made from; empty if not told.
        gold: what a person wrote; None if not told.
        place: file and line, for messages.
    """

    text: str
    source: Source
    gold: str | None
    place: str


@dataclass(frozen=True)
class Pair:
    """The texts of both systems for one item."""

    id: str
    first: str
    second: str
    source: Source
    gold: str | None


@dataclass(frozen=True)
class Pairing:
    """The pairs, and how many ids only one of the two files has."""

    pairs: list[Pair]
    only_first: int
    only_second: int


def read_texts(path: str | Path) -> dict[str, Text]:
    """The texts of one system by id.

    Args:
        path: JSON lines with `id` and `text`; `input` (a text, a list, or an object of these) and `gold` if there are.

    Raises:
        DataError: the file cannot be read or has none; a line is no JSON object, lacks a key, or its id came before.
    """
    try:
        lines = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    found: dict[str, Text] = {}
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        place = f"{path}:{number}"
        name, text = _read_line(raw, place)
        if name in found:
            raise DataError(f"{place}: the id {name!r} is that of {found[name].place} too; an id stands for one text")
        found[name] = text
    if not found:
        raise DataError(f'{path}: has no texts; a line is as {{"id": "1", "text": "..."}}')
    return found


def pair_texts(first: dict[str, Text], second: dict[str, Text]) -> Pairing:
    """Texts of equal id side by side, in the order of the first file.

    Raises:
        DataError: no id is in both, or `input` or `gold` of an id differ.
    """
    both = [name for name in first if name in second]
    if not both:
        one, other = next(iter(first)), next(iter(second))
        raise DataError(f"the two files have no id in common; theirs begin with {one!r} and {other!r}")
    pairs = []
    for name in both:
        a, b = first[name], second[name]
        for key, one, other in _told_twice(a, b):
            if one != other:
                raise DataError(f"{b.place}: {key} of {name!r} is not that of {a.place}; are these the same items?")
        pairs.append(Pair(name, a.text, b.text, a.source or b.source, a.gold or b.gold))
    return Pairing(pairs, len(first) - len(both), len(second) - len(both))


def _told_twice(a: Text, b: Text) -> list[tuple[str, Any, Any]]:
    both: list[tuple[str, Any, Any]] = [("input", a.source, b.source), ("gold", a.gold, b.gold)]
    return [(key, one, other) for key, one, other in both if one and other]


def _read_line(raw: bytes, place: str) -> tuple[str, Text]:
    try:
        row = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: byte {error.start} is not UTF-8; convert the file first") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: is not JSON: {error.msg}, column {error.colno}") from None
    except (ValueError, RecursionError):
        raise DataError(f"{place}: is JSON that cannot be read: a number too long or brackets too deep") from None
    if not isinstance(row, dict):
        raise DataError(f'{place}: is no JSON object; a line is as {{"id": "1", "text": "..."}}')
    missing = [key for key in ("id", "text") if key not in row]
    if missing:
        raise DataError(f"{place}: has no {missing[0]!r}; its keys are {', '.join(map(repr, row)) or 'none'}")
    name, text, gold = row["id"], row["text"], row.get("gold")
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise DataError(f"{place}: 'id' must be a text or a whole number")
    if not isinstance(text, str):
        raise DataError(f"{place}: 'text' must be a text")
    if gold is not None and not isinstance(gold, str):
        raise DataError(f"{place}: 'gold' must be a text")
    return str(name), Text(text, _source(row.get("input")), gold, place)


def _source(value: Any) -> Source:
    """A text, a list, or an object of these, as labelled lines."""
    parts = value.items() if isinstance(value, dict) else [("", value)]
    return [(str(label), lines) for label, part in parts if (lines := _lines(part))]


def _lines(part: Any) -> list[str]:
    if part is None or part == "":
        return []
    if isinstance(part, list):
        return [" · ".join(map(_word, one)) if isinstance(one, list) else _word(one) for one in part]
    return [_word(part)]


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
