"""Labelled texts from tab-separated files, and the `Examples` every reader of single texts returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from repulsive.errors import DataError
from repulsive.lab.text.lines import BadLines, read_lines


@dataclass(frozen=True)
class Examples:
    """Texts with a class each.

    Args:
        texts: the texts.
        labels: class of each text, an index into `classes`.
        classes: names of the classes.
        skipped: bad lines that were left out in reading.
    """

    texts: list[str]
    labels: list[int]
    classes: tuple[str, ...]
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.texts)

    def select(self, indices: Sequence[int]) -> Self:
        """Some of the examples, in the order given."""
        return replace(self, texts=[self.texts[i] for i in indices], labels=[self.labels[i] for i in indices])

    def counts(self) -> dict[str, int]:
        """How many texts each class has."""
        return {name: self.labels.count(i) for i, name in enumerate(self.classes)}


def read_tsv(
    path: str | Path,
    label: str | int = 0,
    text: str | int = 1,
    *,
    header: bool | None = None,
    classes: Sequence[str] | None = None,
    limit: int = 20,
) -> Examples:
    """Labelled texts from two columns of a tab-separated file; quotes have no meaning.

    Args:
        path: the file, plain, gzip or xz.
        label: the label's column, by name or index.
        text: the text's column, by name or index.
        header: does the first line name the columns? None: yes if a column is given by name.
        classes: the labels allowed, in the order of their indices; None: those found, sorted.
        limit: bad lines that may be skipped.

    Raises:
        DataError: no such column, too many bad lines, no usable line, or a label that is not among `classes` too often.
    """
    with BadLines(path, limit) as bad:
        rows = [
            (number, values[0], values[1])
            for number, values in read_columns(path, (label, text), bad, header)
            if _filled(number, values, bad)
        ]
        return label_rows(path, rows, classes, bad)


def read_columns(
    path: str | Path, columns: Sequence[str | int], bad: BadLines, header: bool | None = None
) -> Iterator[tuple[int, list[str]]]:
    """(line number, the columns asked for) of each line.

    Raises:
        DataError: the file is empty, or the header has no such column.
    """
    if header is None:
        header = any(isinstance(column, str) for column in columns)
    places: list[int] | None = None
    width = 0
    for number, line in read_lines(path, bad):
        fields = line.split("\t")
        if places is None:
            places, width = _places(path, columns, fields, header), len(fields)
            if header:
                continue
        if not line.strip():
            continue  # an empty line, often the last
        if len(fields) <= max(places):
            bad.skip(number, f"has {len(fields)} columns; column {max(places)} (from 0) is needed")
        elif len(fields) > width:
            bad.skip(number, f"has {len(fields)} columns where the first line has {width}: a tab inside a text?")
        else:
            yield number, [fields[place] for place in places]
    if places is None:
        raise DataError(f"{path}: empty file")


def label_rows(
    path: str | Path,
    rows: Sequence[tuple[int, str, str]],
    classes: Sequence[str] | None,
    bad: BadLines,
    read: Callable[[str], str | None] = str.strip,
) -> Examples:
    """Examples of (line number, label, text) rows.

    Args:
        path: for messages.
        rows: what was read.
        classes: as in `read_tsv`.
        bad: counts labels that are none.
        read: turns what stands in the file into a class name, None where it cannot.
    """
    kept: list[tuple[str, str]] = []
    for number, label, text in rows:
        name = read(label)
        if not name or (classes is not None and name not in classes):
            bad.skip(number, f"label {label!r} is none of {list(classes)}" if classes else f"label {label!r} is none")
        else:
            kept.append((name, text))
    if not kept:
        raise DataError(f"{path}: no usable line" + (f"; {bad.first[0]}" if bad.first else ""))
    names = tuple(classes if classes is not None else sorted({name for name, _ in kept}))
    index = {name: i for i, name in enumerate(names)}
    return Examples([text for _, text in kept], [index[name] for name, _ in kept], names, bad.count)


def _places(path: str | Path, columns: Sequence[str | int], first: list[str], header: bool) -> list[int]:
    places = []
    for column in columns:
        if isinstance(column, int):
            if not 0 <= column < len(first):
                raise DataError(f"{path}: no column {column}; the first line has columns 0 to {len(first) - 1}")
            places.append(column)
        elif not header:
            raise DataError(f"{path}: column {column!r} is asked for by name, but header=False")
        elif column not in first:
            raise DataError(f"{path}: no column {column!r}; the header has {', '.join(map(repr, first[:12]))}")
        else:
            places.append(first.index(column))
    return places


def _filled(number: int, values: list[str], bad: BadLines) -> bool:
    if values[1].strip():
        return True
    bad.skip(number, "empty text")
    return False
