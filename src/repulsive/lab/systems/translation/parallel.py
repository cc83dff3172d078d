"""Read parallel files: line n of one file is the translation of line n of the other file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from repulsive.errors import DataError
from repulsive.lab.text.inputs import PART_NAMES, find_file
from repulsive.lab.text.lines import read_lines
from repulsive.lab.text.prepared import PARTS

# Names that a further test set cannot have, because files of a prepared folder or entries of a result have them.
TAKEN = (*PARTS, "vectors", "label", "best_step", "steps", "seconds", "averaged", "notes", "sha256")


def find_pairs(
    folder: Path, source: str, target: str, also: Mapping[str, str | Path] | None = None
) -> dict[str, tuple[Path, Path]]:
    """Find the source and target files of every data split of a language pair.

    Args:
        folder: holds `train.de` and the others, plain, xz or gzip; `PART_NAMES` has all names that are recognised.
        source: language to translate from, as file names end.
        target: language to translate to.
        also: further test sets, name -> path without the language's ending.

    Raises:
        DataError: files are missing, or the languages are the same.
    """
    if source == target or not source or not target:
        raise DataError(f"source={source!r}, target={target!r}: give two different endings, such as de and en")
    files: dict[str, tuple[Path, Path]] = {}
    for part, names in PART_NAMES.items():
        for name in names:
            pair = find_file(folder, f"{name}.{source}"), find_file(folder, f"{name}.{target}")
            if pair[0] is not None and pair[1] is not None:
                files[part] = (pair[0], pair[1])
                break
        else:
            raise DataError(
                f"{folder}: no {part} files in {source} and {target}; expected {' or '.join(names)}, with .{source} "
                f"and .{target}, plain, .xz or .gz"
            )
    for name, base in (also or {}).items():
        files[name] = find_further(name, Path(base), source, target)
    return files


def find_further(name: str, base: Path, source: str, target: str) -> tuple[Path, Path]:
    """Find the two files of a further test set.

    Args:
        name: name of the test set.
        base: path of its files, without the language's ending.
        source: language to translate from, as the file's name ends.
        target: language to translate to.

    Raises:
        DataError: a file is missing, or the name is not allowed.
    """
    if not re.fullmatch("[a-z][a-z0-9_-]*", name):
        raise DataError(f"--also {name!r}: expected a name of lower-case letters, digits, - and _, a letter first")
    if name in TAKEN:
        raise DataError(f"--also {name!r}: the name is taken; choose another")
    first, second = (find_file(base.parent, f"{base.name}.{language}") for language in (source, target))
    if first is None or second is None:
        missing = f"{base}.{source if first is None else target}"
        raise DataError(
            f"--also {name!r}: no file {missing}, plain, .xz or .gz; give the path without .{source} and .{target}"
        )
    return first, second


def read_pair(source: Path, target: Path) -> tuple[list[str], list[str]]:
    """Read the lines of two parallel files; none is skipped, because that would misalign all lines after it.

    Raises:
        DataError: a file is missing, empty, damaged or not UTF-8, or they have different numbers of lines.
    """
    sides = [[line.strip() for _, line in read_lines(path)] for path in (source, target)]
    for path, lines in zip((source, target), sides, strict=True):
        if not any(lines):
            raise DataError(f"{path}: empty file")
    if len(sides[0]) != len(sides[1]):
        short, long = sorted(((len(lines), path) for lines, path in zip(sides, (source, target), strict=True)))
        raise DataError(
            f"{short[1]}: ends after line {short[0]}, but {long[1]} has {long[0]} lines; line n of one must be the "
            "translation of line n of the other"
        )
    return sides[0], sides[1]


def clean(sides: list[list[list[str]]], longest: int, ratio: float) -> list[list[list[str]]]:
    """Keep pairs in which both sentences have 1 to `longest` words, and neither has over `ratio` times the other's.

    Args:
        sides: words of the source sentences, and of the target sentences.
        longest: maximum length of a sentence.
        ratio: maximum length of the longer sentence over the shorter one.
    """
    kept = [
        pair
        for pair in zip(*sides, strict=True)
        if (least := min(map(len, pair))) and (most := max(map(len, pair))) <= longest and most <= ratio * least
    ]
    return [[pair[side] for pair in kept] for side in range(len(sides))]
