"""Read a text for language models: one file per data split, or documents that are assigned to the splits at random."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from repulsive.errors import DataError
from repulsive.lab.text.documents import read_documents
from repulsive.lab.text.inputs import PART_NAMES, find_file
from repulsive.lab.text.lines import BadLines, read_lines
from repulsive.lab.text.prepared import PARTS

Passage = tuple[str, str]  # the data split, and a text that ends with a line feed


def find_part_files(data: Path, suffix: str | None) -> dict[str, Path]:
    """Find files for train, dev and test in a folder.

    Args:
        data: a folder; for a file the result is empty.
        suffix: extension of the files; None: "txt".

    Returns:
        Data split -> file; empty if the folder has no such files.

    Raises:
        DataError: only some of the files are there, or none and a suffix is given.
    """
    ending, files = suffix or "txt", dict[str, Path]()
    for part, names in PART_NAMES.items() if data.is_dir() else ():
        if here := [path for name in names if (path := find_file(data, f"{name}.{ending}"))]:
            files[part] = here[0]
    missing = [part for part in PARTS if part not in files]
    if missing and (files or suffix is not None):
        expected = " or ".join(f"{name}.{ending}" for name in PART_NAMES[missing[0]])
        raise DataError(f"{data}: no {missing[0]} file; expected {expected}, plain, .xz or .gz")
    return files


def read_parts(files: Mapping[str, Path], limit: int) -> Iterator[Passage]:
    """Yield the lines of the files of all data splits.

    Args:
        files: data split -> file.
        limit: number of bad lines that may be skipped in a file.

    Raises:
        DataError: a file is damaged, or has too many bad lines.
    """
    for part, path in files.items():
        with BadLines(path, limit) as bad:
            yield from ((part, f"{line}\n") for _, line in read_lines(path, bad))


def split_documents(paths: Sequence[Path], dev: float, seed: int, limit: int) -> Iterator[Passage]:
    """Yield documents, each followed by a blank line, and assign them to the data splits at random.

    Args:
        paths: text files and archives; see `documents`.
        dev: share of the documents that go to dev; test gets as many.
        seed: random seed.
        limit: number of bad lines that may be skipped in a file.

    Raises:
        DataError: a file is damaged, or has too many bad lines.
    """
    draw = random.Random(seed)
    for path in paths:
        for document in read_documents(path, limit):
            at = draw.random()
            part = "dev" if at < dev else "test" if at < 2 * dev else "train"
            yield part, "\n".join(document) + "\n\n"
