"""Raw texts before they are words: what a task's files are, and what is read from them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from repulsive.errors import DataError
from repulsive.lab.systems.classification.generated import Review
from repulsive.lab.text.prepared import PARTS

_PACKED = ("", ".xz", ".gz")


@dataclass(frozen=True)
class RawPart:
    """Texts of one part.

    Args:
        texts: one list, or two of the same length: premises and hypotheses.
        labels: class of each text or pair, or a number of points.
        skipped: bad lines left out in reading.
        unlabelled: pairs left out because annotators did not agree.
        reviews: where the texts are generated, all that is known of them.
        indices: what the file calls its rows, where that is needed.
    """

    texts: tuple[list[str], ...]
    labels: Sequence[float]
    skipped: int = 0
    unlabelled: int = 0
    reviews: Sequence[Review] = ()
    indices: Sequence[int] = ()


@dataclass(frozen=True)
class Raw:
    """Texts of a task.

    Args:
        classes: names of the classes.
        parts: "train", "dev" and "test", and further ones to be tested on.
    """

    classes: tuple[str, ...]
    parts: dict[str, RawPart]


@dataclass(frozen=True)
class Source:
    """A task's files, found and not yet read.

    Args:
        sums: SHA-256 of each.
        read: reads them.
        longest: words kept of a text where nothing else is asked for; None: all.
        in_words: do single spaces separate the words already?
        vocabulary: a file of pieces, where they are given and not learned.
    """

    sums: dict[str, str]
    read: Callable[[], Raw]
    longest: int | None
    in_words: bool = False
    vocabulary: Path | None = None


def find_file(folder: Path, name: str) -> Path | None:
    """The file of this name, plain, xz or gzip; None where there is none."""
    return next((path for end in _PACKED if (path := folder / (name + end)).is_file()), None)


def find_parts(folder: Path, patterns: Sequence[str], parts: Sequence[str] = PARTS, other: str = "") -> dict[str, Path]:
    """The file of each part, all by the same pattern.

    Args:
        folder: where to look.
        patterns: `{}.tsv`, say, {} being the part; the first that has every part is taken.
        parts: which are wanted.
        other: what else would do, for the message.

    Raises:
        DataError: no pattern has every part.
    """
    missing = []
    for pattern in patterns:
        found = {part: path for part in parts if (path := find_file(folder, pattern.format(part)))}
        if len(found) == len(parts):
            return found
        missing += [pattern.format(part) for part in parts if part not in found][:1]
    missing += [other] if other else []
    raise DataError(f"{folder}: no {', no '.join(missing)}; files may be plain, .xz or .gz")


def sums_of(paths: Sequence[Path], folder: Path) -> dict[str, str]:
    """SHA-256 of files, named by their place in a folder.

    Raises:
        DataError: one cannot be read.
    """
    found = {}
    for path in sorted(paths):
        try:
            with open(path, "rb") as file:
                found[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    return found
