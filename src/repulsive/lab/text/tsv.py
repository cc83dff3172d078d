"""Read labelled texts from tab-separated files. `Examples` is what every reader of single texts returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from repulsive.errors import DataError
from repulsive.lab.text.lines import BadLines, read_lines


@dataclass(frozen=True)
class Examples:
    """Labelled texts: each text has one class.

    Args:
        texts: the texts.
        labels: class of each text, an index into `classes`.
        classes: names of the classes.
        skipped: number of bad lines left out.
    """

    texts: list[str]
    labels: list[int]
    classes: tuple[str, ...]
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.texts)

    def select(self, indices: Sequence[int]) -> Self:
        """Select examples, in the given order."""
        return replace(self, texts=[self.texts[i] for i in indices], labels=[self.labels[i] for i in indices])

    def counts(self) -> dict[str, int]:
        """Count the texts of each class."""
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
    """Read labelled texts from two columns of a tab-separated file. Quotes are not special.

    Args:
        path: the file, plain, gzip or xz.
        label: the label's column, by name or index.
        text: the text's column, by name or index.
        header: whether the first line names the columns; None: yes if a column is given by name.
        classes: the labels allowed, in the order of their indices; None: those in the file, sorted.
        limit: number of bad lines that may be skipped.

    Raises:
        DataError: no such column, no usable line, or too many bad lines or labels.
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
    """Yield the line number and the given columns of each line.

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
            bad.skip(number, f"has {len(fields)} columns, expected at least {max(places) + 1}")
        elif len(fields) > width:
            bad.skip(number, f"has {len(fields)} columns, the first line has {width}; is there a tab inside a text?")
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
    """Turn rows of (line number, label, text) into examples.

    Args:
        path: the file, for messages.
        rows: rows as read from the file.
        classes: the labels allowed, as in `read_tsv`.
        bad: counter of lines that are skipped because of invalid labels.
        read: function that converts a label of the file into a class name, or None for an invalid label.
    """
    kept: list[tuple[str, str]] = []
    for number, label, text in rows:
        name = read(label)
        if not name or (classes is not None and name not in classes):
            bad.skip(number, f"invalid label {label!r}" + (f", expected one of {list(classes)}" if classes else ""))
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
            raise DataError(f"{path}: column {column!r} is given by name, but header=False")
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
