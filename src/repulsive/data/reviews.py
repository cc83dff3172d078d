"""Reviews with 1 to 5 stars: Yelp's own JSON lines, or tab-separated files.

The paper takes 500,000 reviews for training and 2,000 each for development and test from Yelp's archive: read
`yelp_academic_dataset_review.json` and `split` it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from repulsive.data.lines import BadLines, first_line, read_json
from repulsive.data.tsv import Examples, label_rows, read_columns
from repulsive.errors import DataError

STARS = ("1", "2", "3", "4", "5")
_LABELS = ("stars", "label")


def read_reviews(path: str | Path, *, most: int | None = None, limit: int = 20) -> Examples:
    """Reviews and their stars; class i is i + 1 stars.

    Args:
        path: JSON lines with `stars` and `text`, or a TSV whose first two columns are stars and text, with or without
            a header; plain, gzip or xz. Which of the two it is is read off the first line.
        most: stop after so many reviews; None: read all.
        limit: bad lines that may be skipped.

    Raises:
        DataError: the file is empty or of neither kind, or has more bad lines than `limit`.
    """
    with BadLines(path, limit) as bad:
        first = first_line(path)
        rows: list[tuple[int, str, str]] = []
        for row in _json_rows(path, bad) if first.lstrip().startswith("{") else _tsv_rows(path, first, bad):
            rows.append(row)
            if most is not None and len(rows) >= most:
                break
        return label_rows(path, rows, STARS, bad, _star)


def split(examples: Examples, sizes: Sequence[int], seed: int = 0) -> list[Examples]:
    """Disjoint random parts of the sizes given, and the rest as the last part.

    Args:
        examples: what to split.
        sizes: of the parts, (2000, 2000) for development and test, say.
        seed: the same seed gives the same parts.
    """
    if sum(sizes) >= len(examples):
        raise DataError(f"parts of {list(sizes)} cannot be taken from {len(examples)} examples and leave any")
    order = list(range(len(examples)))
    random.Random(seed).shuffle(order)
    parts, start = [], 0
    for size in sizes:
        parts.append(examples.select(order[start : start + size]))
        start += size
    return [*parts, examples.select(order[start:])]


def _json_rows(path: str | Path, bad: BadLines) -> Iterator[tuple[int, str, str]]:
    for number, review in read_json(path, bad):
        if "stars" not in review or not isinstance(review.get("text"), str):
            bad.skip(number, "no `stars` and `text`")
        elif not review["text"].strip():
            bad.skip(number, "empty text")
        else:
            yield number, str(review["stars"]), review["text"]


def _tsv_rows(path: str | Path, first: str, bad: BadLines) -> Iterator[tuple[int, str, str]]:
    fields = first.split("\t")
    header = "text" in fields
    if not header and (len(fields) < 2 or _star(fields[0]) is None):
        raise DataError(f"{path}: neither JSON lines, nor a TSV of stars and text; it starts {first[:60]!r}")
    label = next((name for name in _LABELS if name in fields), None)
    if header and label is None:
        raise DataError(f"{path}: the header has none of the columns {_LABELS}; it has {fields[:12]}")
    columns: tuple[str | int, str | int] = (str(label), "text") if header else (0, 1)
    for number, (stars, text) in read_columns(path, columns, bad, header):
        if text.strip():
            yield number, stars, text
        else:
            bad.skip(number, "empty text")


def _star(text: str) -> str | None:
    """`4`, `4.0` -> `4`; None for anything else."""
    try:
        value = float(text)
    except ValueError:
        return None
    return str(int(value)) if value in (1, 2, 3, 4, 5) else None
