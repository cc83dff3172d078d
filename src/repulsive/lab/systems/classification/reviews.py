"""Read reviews with 1 to 5 stars, from Yelp's own JSON lines or tab-separated files.

The paper takes 500,000 reviews for training and 2,000 each for development and test from Yelp's archive:

    reviews = read_reviews("yelp_academic_dataset_review.json", most=504_000, seed=0)
    dev, test, train = split(reviews, (2000, 2000), seed=0)
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from repulsive.errors import DataError
from repulsive.lab.text.lines import BadLines, first_line, read_json
from repulsive.lab.text.tsv import Examples, label_rows, read_columns

STARS = ("1", "2", "3", "4", "5")
Row = tuple[int, str, str]  # line, stars, text
_LABELS = ("stars", "label")


def read_reviews(path: str | Path, *, most: int | None = None, seed: int | None = None, limit: int = 20) -> Examples:
    """Read reviews and their stars; class i is i + 1 stars.

    Args:
        path: JSON lines with `stars` and `text`, or a TSV whose first two columns are stars and text, with or without
            a header; plain, gzip or xz. The first line decides which format it is.
        most: maximum number of reviews; None: all.
        seed: draw a random sample of `most` reviews, in file order, and keep only these in memory; None: take
            the first ones.
        limit: number of bad lines that may be skipped.

    Raises:
        DataError: the file is empty or has another format, or has more bad lines than `limit`.
    """
    with BadLines(path, limit) as bad:
        first = first_line(path)
        rows = _json_rows(path, bad) if first.lstrip().startswith("{") else _tsv_rows(path, first, bad)
        good = (row for row in rows if _has_stars(row, bad))
        return label_rows(path, list(good) if most is None else _take(good, most, seed), STARS, bad, _star)


def split(examples: Examples, sizes: Sequence[int], seed: int = 0) -> list[Examples]:
    """Split examples at random into sets of the given sizes, followed by a last set with all remaining examples.

    Args:
        examples: the reviews to split.
        sizes: sizes of the sets, such as (2000, 2000) for development and test.
        seed: random seed.
    """
    if sum(sizes) >= len(examples):
        raise DataError(f"parts of {list(sizes)} leave none of {len(examples)} examples to train on")
    order = list(range(len(examples)))
    random.Random(seed).shuffle(order)
    parts, start = [], 0
    for size in sizes:
        parts.append(examples.select(order[start : start + size]))
        start += size
    return [*parts, examples.select(order[start:])]


def _json_rows(path: str | Path, bad: BadLines) -> Iterator[Row]:
    for number, review in read_json(path, bad):
        if "stars" not in review or not isinstance(review.get("text"), str):
            bad.skip(number, "no `stars` and `text`")
        elif not review["text"].strip():
            bad.skip(number, "empty text")
        else:
            yield number, str(review["stars"]), review["text"]


def _tsv_rows(path: str | Path, first: str, bad: BadLines) -> Iterator[Row]:
    fields = first.split("\t")
    header = "text" in fields
    if not header and (len(fields) < 2 or _star(fields[0]) is None):
        raise DataError(f"{path}: expected JSON lines, or a TSV of stars and text; it starts {first[:60]!r}")
    label = next((name for name in _LABELS if name in fields), None)
    if header and label is None:
        raise DataError(f"{path}: expected one of the columns {_LABELS} in the header, got {fields[:12]}")
    columns: tuple[str | int, str | int] = (str(label), "text") if header else (0, 1)
    for number, (stars, text) in read_columns(path, columns, bad, header):
        if text.strip():
            yield number, stars, text
        else:
            bad.skip(number, "empty text")


def _take(rows: Iterable[Row], most: int, seed: int | None) -> list[Row]:
    """Take the first rows, or draw a uniform sample by Algorithm R (Vitter, 1985)."""
    if seed is None:
        return list(islice(rows, most))
    draw, kept = random.Random(seed), []
    for i, row in enumerate(rows):
        if i < most:
            kept.append(row)
        elif (place := draw.randrange(i + 1)) < most:
            kept[place] = row
    return sorted(kept)


def _has_stars(row: Row, bad: BadLines) -> bool:
    if _star(row[1]) is None:
        bad.skip(row[0], f"{row[1]!r}, expected 1 to 5 stars")
        return False
    return True


def _star(text: str) -> str | None:
    """Normalise a number of stars: `4`, `4.0` -> `4`; None for anything else."""
    try:
        value = float(text)
    except ValueError:
        return None
    return str(int(value)) if value in (1, 2, 3, 4, 5) else None
