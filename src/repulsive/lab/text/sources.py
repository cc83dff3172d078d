"""The tasks: one function each finds the files and says how they are read."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from repulsive.errors import DataError
from repulsive.lab.systems.classification import movie_reviews, snli
from repulsive.lab.systems.classification.age import read_age, split_authors
from repulsive.lab.systems.classification.generated import generate
from repulsive.lab.systems.classification.reviews import STARS, read_reviews, split
from repulsive.lab.systems.glue import prepare as prepare_glue
from repulsive.lab.systems.translation.parallel import find_pairs
from repulsive.lab.text.prepared import PARTS
from repulsive.lab.text.raw import Raw, RawPart, Source, find_file, find_parts, sums_of
from repulsive.lab.text.tsv import Examples, read_tsv

YELP = "yelp_academic_dataset_review.json"
YELP_SIZES = {"train": 500_000, "dev": 2_000, "test": 2_000}  # the paper's


def find(task: str, data: Path | None, seed: int, limit: int, options: dict[str, Any]) -> Source:
    """The source of a task.

    Args:
        task: its name.
        data: the folder its files are in, or where it is fetched to.
        seed: of whatever is drawn.
        limit: bad lines that may be skipped in a file.
        options: the task's own.

    Raises:
        DataError: there is no such task or option, or files are missing.
    """
    if task in ELSEWHERE:
        raise DataError(f"task {task!r} has a plan of its own: call {ELSEWHERE[task]}")
    if task not in TASKS:
        names = (*TASKS, *ELSEWHERE)
        near = get_close_matches(task, names, 1, 0.6)
        meant = f"did you mean {near[0]!r}? Tasks" if near else "tasks"
        raise DataError(f"task {task!r} is unknown; {meant}: {', '.join(names)}")
    known = options_of(task)
    for name in options:
        if name not in known:
            raise DataError(f"task {task!r} has no option {name!r}; it has {', '.join(known) or 'none'}")
    if task == "reviews" and data is not None:
        raise DataError(f"task {task!r} is generated: it reads no data, and {data} would not be used")
    if task in FROM_FILES and data is None:
        raise DataError(f"task {task!r} needs the folder of its files: give --data, or set REPULSIVE_DATA")
    if task in FROM_FILES and data is not None and not data.exists():
        raise DataError(f"{data}: no such folder; it should hold the files of task {task!r}")
    return TASKS[task](data, seed, limit, **options)


def options_of(task: str) -> list[str]:
    """Names of the options a task has of its own."""
    parameters = inspect.signature(TASKS[task]).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


def _yelp(
    data: Path, seed: int, limit: int, *, train: int | None = None, dev: int | None = None, test: int | None = None
) -> Source:
    asked = {name: size for name, size in zip(PARTS, (train, dev, test), strict=True) if size is not None}
    whole = data if data.is_file() else find_file(data, YELP)
    if whole is not None:
        return Source(sums_of([whole], whole.parent), partial(_sampled, whole, YELP_SIZES | asked, seed, limit), 200)
    if asked:
        raise DataError(f"{data}: no {YELP}, and only what is taken from it can have sizes")
    return _in_parts(data, lambda path, classes: read_reviews(path, limit=limit), other=YELP)


def _sampled(path: Path, sizes: dict[str, int], seed: int, limit: int) -> Raw:
    """A random sample, and random parts of it."""
    if min(sizes.values()) < 1:
        raise DataError(f"sizes {list(sizes.values())}: every part needs a review")
    wanted = sum(sizes.values())
    found = read_reviews(path, most=wanted, seed=seed, limit=limit)
    if len(found) < wanted:
        told = " + ".join(f"{size:,}" for size in sizes.values())
        raise DataError(f"{path}: has {len(found):,} reviews, not {told}; say how many with --train, --dev and --test")
    dev, test, train = split(found, (sizes["dev"], sizes["test"]), seed)
    parts = {name: RawPart((part.texts,), part.labels) for name, part in (("dev", dev), ("test", test))}
    return Raw(STARS, {"train": RawPart((train.texts,), train.labels, found.skipped), **parts})


def _age(data: Path, seed: int, limit: int, *, dev: float = 0.1) -> Source:
    if not 0 < dev < 1:
        raise DataError(f"dev={dev:g}: it is the share of the training texts that dev takes, between 0 and 1")
    if (data / "train").is_dir() and (data / "test").is_dir():
        places = {name: data / name for name in ("train", "test")}
        files = [path for folder in places.values() for path in folder.iterdir() if path.is_file()]
    else:
        places = find_parts(data, ["{}.tsv"], ("train", "test"), other="PAN folders train/ and test/")
        files = list(places.values())

    def read() -> Raw:
        whole = read_age(places["train"], limit=limit)
        train, held = split_authors(whole, dev, seed)
        test = read_age(places["test"], classes=whole.classes, limit=limit)
        parts = {"train": (train, whole.skipped), "dev": (held, 0), "test": (test, test.skipped)}
        raw = {name: RawPart((part.texts,), part.labels, skipped) for name, (part, skipped) in parts.items()}
        return Raw(whole.classes, raw)

    return Source(sums_of(files, data), read, 64)


def _snli(data: Path, seed: int, limit: int) -> Source:
    files = find_parts(data, ["snli_1.0_{}.jsonl", "{}.tsv"])

    def read() -> Raw:
        parts = {}
        for name, path in files.items():
            pairs = snli.read_snli(path, limit=limit)
            texts = ([plain_quotes(text) for text in side] for side in (pairs.premises, pairs.hypotheses))
            parts[name] = RawPart(tuple(texts), pairs.labels, pairs.skipped, pairs.unlabelled)
        return Raw(snli.CLASSES, parts)

    return Source(sums_of(list(files.values()), data), read, 64)


def plain_quotes(text: str) -> str:
    """Quotation marks for the two that the Penn Treebank writes.

    Some copies of SNLI have one part tokenised and the others plain. spaCy makes the same words of both but for these
    marks, which would be unknown words: plain text does not have them.

    Example:
        >>> plain_quotes("A sign says `` no '' .")
        'A sign says " no " .'
    """
    return text.replace("``", '"').replace("''", '"')


def _tsv(
    data: Path,
    seed: int,
    limit: int,
    *,
    label: str | int = "label",
    text: str | int = "text",
    header: bool | None = None,
) -> Source:
    def read(path: Path, classes: tuple[str, ...] | None) -> Examples:
        return read_tsv(path, label, text, header=header, classes=classes, limit=limit)

    return _in_parts(data, read)


def _translation(
    data: Path,
    seed: int,
    limit: int,
    *,
    source: str = "de",
    target: str = "en",
    ratio: float = 9.0,
    also: Mapping[str, str | Path] | None = None,
) -> Source:
    return find_pairs(data, source, target, ratio, also)


def _glue(
    data: Path,
    seed: int,
    limit: int,
    *,
    glue_task: str = "",
    vocabulary: str | Path | None = None,
    held_out: float = 0.0,
    stops: str = "auto",
) -> Source:
    return prepare_glue.find_source(data, seed, limit, glue_task, vocabulary, held_out, stops)


def _in_parts(data: Path, read: Callable[[Path, tuple[str, ...] | None], Examples], other: str = "") -> Source:
    files = find_parts(data, ["{}.tsv"], other=other)

    def read_all() -> Raw:
        train = read(files["train"], None)
        found = {"train": train} | {name: read(files[name], train.classes) for name in ("dev", "test")}
        parts = {name: RawPart((part.texts,), part.labels, part.skipped) for name, part in found.items()}
        return Raw(train.classes, parts)

    return Source(sums_of(list(files.values()), data), read_all, 200)


def _reviews(
    data: None,
    seed: int,
    limit: int,
    *,
    train: int = 10_000,
    dev: int = 1_000,
    test: int = 1_000,
    aspects: tuple[int, int] = (3, 5),
    filler: int = 1,
) -> Source:
    if min(train, dev, test) < 1 or filler < 0:
        told = f"train={train}, dev={dev}, test={test}, filler={filler}"
        raise DataError(f"{told}: every part needs a review, and filler cannot be negative")
    try:
        made = generate(test + dev + train, seed, aspects=(aspects[0], aspects[1]), filler=filler)
    except ValueError as error:
        raise DataError(str(error)) from None
    # train comes last: dev and test stay the same for any size of it
    reviews = {"train": made[test + dev :], "dev": made[test : test + dev], "test": made[:test]}
    parts, sums = {}, {}
    for name, some in reviews.items():
        texts = [review.text for review in some]
        parts[name] = RawPart((texts,), [review.stars - 1 for review in some], reviews=some)
        sums[f"generated {name}"] = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    return Source(sums, lambda: Raw(STARS, parts), None, in_words=True)


def _movie_reviews(data: Path, seed: int, limit: int) -> Source:
    def read() -> Raw:
        found = movie_reviews.read_movie_reviews(movie_reviews.fetch(data), limit=limit)
        parts = movie_reviews.split_snippets(found, seed=seed)
        raw = {name: RawPart((part.texts,), part.labels) for name, part in parts.items()}
        return Raw(found.classes, raw)

    return Source({movie_reviews.ARCHIVE: movie_reviews.SHA256}, read, 64)


TASKS: dict[str, Callable[..., Source]] = {
    "yelp": _yelp,
    "age": _age,
    "snli": _snli,
    "tsv": _tsv,
    "translation": _translation,
    "glue": _glue,
    "reviews": _reviews,
    "movie-reviews": _movie_reviews,
}
ELSEWHERE = {
    "pretrain": "data.pretrain.plan_pretrain",
    "graphs": "data.prepare_graphs.plan_graphs",
    "lm": "data.prepare_text.plan_text",
    "lm-toy": "data.prepare_text.plan_toy",
}
FROM_FILES = ("yelp", "age", "snli", "tsv", "translation", "glue")  # the others are made, or fetched
