"""Find input files, plain or compressed, and compute their checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from repulsive.errors import DataError
from repulsive.lab.text.prepared import PARTS

# File names of each data split, without extension, as in fairseq's scripts for IWSLT14 and WMT14, Multi30k, Tatoeba
# and Europarl.
PART_NAMES = {
    "train": ("train", "train_partial"),
    "dev": ("dev", "valid", "val"),
    "test": ("test", "test_2016_flickr", "test2016"),
}
_COMPRESSED = ("", ".xz", ".gz")


def find_file(folder: Path, name: str) -> Path | None:
    """Find a file, plain or with the extension .xz or .gz; return None if there is no such file."""
    return next((path for end in _COMPRESSED if (path := folder / (name + end)).is_file()), None)


def find_parts(folder: Path, patterns: Sequence[str], parts: Sequence[str] = PARTS, other: str = "") -> dict[str, Path]:
    """Find one file per data split, all named by the same pattern.

    Args:
        folder: where to look.
        patterns: file names such as `{}.tsv`, where {} is the split; the first that matches every split is used.
        parts: the data splits that are needed.
        other: description of an alternative input, for the error message.

    Raises:
        DataError: no pattern matches a file for every data split.
    """
    missing = []
    for pattern in patterns:
        files = {part: path for part in parts if (path := find_file(folder, pattern.format(part)))}
        if len(files) == len(parts):
            return files
        missing += [pattern.format(part) for part in parts if part not in files][:1]
    missing += [other] if other else []
    raise DataError(f"{folder}: no {', no '.join(missing)}; files may be plain, .xz or .gz")


def checksums(paths: Sequence[Path], folder: Path) -> dict[str, str]:
    """Compute the SHA-256 of files, keyed by their path relative to a folder.

    Raises:
        DataError: a file cannot be read.
    """
    sums = {}
    for path in sorted(paths):
        try:
            with open(path, "rb") as file:
                sums[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    return sums
