"""Author profiling: tweets and blog posts, labelled with the age group of their author (the PAN shared tasks).

Training and development set share no author: a model that recognises an author's style would know the age.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self
from xml.etree import ElementTree

from repulsive.errors import DataError
from repulsive.lab.text.lines import BadLines, first_line, read_lines
from repulsive.lab.text.tsv import Examples, label_rows, read_columns

_GROUP = re.compile(r"(\d\d)-(\d\d|xx|plus)", re.IGNORECASE)
Row = tuple[int, str, str, str, str]  # line, age group, text, gender, author


@dataclass(frozen=True)
class Profiles(Examples):
    """Texts labelled with the age group of their author.

    Args:
        genders: gender of each text's author, as in the file.
        authors: author of each text.
    """

    genders: list[str] = field(default_factory=list)
    authors: list[str] = field(default_factory=list)

    def select(self, indices: Sequence[int]) -> Self:
        chosen = super().select(indices)
        genders, authors = ([values[i] for i in indices] for values in (self.genders, self.authors))
        return replace(chosen, genders=genders, authors=authors)


def read_age(path: str | Path, *, classes: Sequence[str] | None = None, limit: int = 20) -> Profiles:
    """Read texts with age groups, genders and authors.

    Args:
        path: a PAN folder (one XML file per author, and `truth.txt`), or a TSV with a header and the columns age
            group, text, gender and author, in this order.
        classes: the age groups, in the order of their indices: `classes` of the training set; None: those in the file,
            sorted. Groups are written `18-24`, `50-XX`.
        limit: number of bad lines, or of authors without a readable file, that may be skipped.

    Raises:
        DataError: the folder or file has another format, is empty, or has more bad lines than `limit`.
    """
    with BadLines(path, limit) as bad:
        rows = list(_xml_rows(Path(path), bad) if Path(path).is_dir() else _tsv_rows(path, bad))
        by_line = {i: row for i, row in enumerate(rows) if _is_valid(row, classes, bad)}
        examples = label_rows(path, [(i, row[1], row[2]) for i, row in by_line.items()], classes, bad, age_group)
        genders, authors = [row[3] for row in by_line.values()], [row[4] for row in by_line.values()]
        return Profiles(examples.texts, examples.labels, examples.classes, bad.count, genders, authors)


def split_authors(profiles: Profiles, share: float = 0.1, seed: int = 0) -> tuple[Profiles, Profiles]:
    """Split texts into a training set and a development set that have no author in common.

    Args:
        profiles: the texts to split.
        share: share of each class's texts that go to the development set; exceeded by at most one author's texts.
        seed: random seed for the choice of authors.

    Raises:
        DataError: a class has a single author, who cannot be in both sets.
    """
    if not 0 < share < 1:
        raise ValueError(f"share={share}: expected a number between 0 and 1")
    sizes: dict[str, int] = {}
    label_of: dict[str, int] = {}
    for author, label in zip(profiles.authors, profiles.labels, strict=True):
        sizes[author] = sizes.get(author, 0) + 1
        label_of.setdefault(author, label)
    held: set[str] = set()
    generator = random.Random(seed)
    for label, name in enumerate(profiles.classes):
        authors = sorted(author for author in sizes if label_of[author] == label)
        if len(authors) == 1:
            raise DataError(f"age group {name} has only one author, who cannot be in both parts; merge or drop it")
        generator.shuffle(authors)
        wanted = share * sum(sizes[author] for author in authors)
        for author in authors[:-1]:  # at least one stays in the training set
            if wanted <= 0:
                break
            held.add(author)
            wanted -= sizes[author]
    sides = [[i for i, author in enumerate(profiles.authors) if (author in held) == dev] for dev in (False, True)]
    return profiles.select(sides[0]), profiles.select(sides[1])


def age_group(text: str) -> str | None:
    """Normalise an age group: `50-xx`, `65-plus` -> `50-XX`, `65-XX`; None for any other text."""
    match = _GROUP.fullmatch(text.strip())
    if match is None:
        return None
    low, high = match.groups()
    return f"{low}-{high if high.isdigit() else 'XX'}"


def _is_valid(row: Row, classes: Sequence[str] | None, bad: BadLines) -> bool:
    group = age_group(row[1])
    if group is not None and (classes is None or group in classes):
        return True
    expected = f"one of {list(classes)}" if classes is not None else "an age group such as 18-24 or 50-XX"
    bad.skip_named(f"author {row[4]}, line {row[0]}", f"{row[1]!r}, expected {expected}")
    return False


def _tsv_rows(path: str | Path, bad: BadLines) -> Iterator[Row]:
    header = age_group(first_line(path).split("\t")[0]) is None
    for number, (group, text, gender, author) in read_columns(path, (0, 1, 2, 3), bad, header):
        if not text.strip() or not author.strip():
            bad.skip(number, "empty text or author")
        else:
            yield number, group, text, gender, author


def _xml_rows(folder: Path, bad: BadLines) -> Iterator[Row]:
    truth = folder / "truth.txt"
    if not truth.is_file():
        raise DataError(f"{folder}: no truth.txt; expected a PAN folder, with truth.txt beside its XML files")
    for number, line in read_lines(truth, bad):
        fields = line.strip().split(":::")
        if not line.strip():
            continue
        if len(fields) < 3:
            bad.skip_named(f"truth.txt, line {number}", "expected author:::gender:::age group")
            continue
        author, gender, group = fields[:3]
        if Path(author).name != author:  # a path could lead out of the folder
            bad.skip_named(f"truth.txt, line {number}", f"{author[:60]!r} is not the name of an author's file")
            continue
        texts = _texts(folder / f"{author}.xml", bad)
        yield from ((number, group, text, gender, author) for text in texts)


def _texts(path: Path, bad: BadLines) -> list[str]:
    try:
        root = ElementTree.parse(path).getroot()
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        bad.skip_named(path.name, "no such file" if missing else f"cannot be read ({error.strerror})")
        return []
    except (ElementTree.ParseError, ValueError, LookupError) as error:  # the last two: unknown encoding
        bad.skip_named(path.name, f"not XML ({error})")
        return []
    texts = [" ".join("".join(document.itertext()).split()) for document in root.iter("document")]
    return [text for text in texts if text]
