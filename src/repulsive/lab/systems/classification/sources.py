"""Find the files of each classification dataset, and read them into one common form, `Raw`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from repulsive.errors import DataError
from repulsive.lab.systems.classification import movie_reviews, snli
from repulsive.lab.systems.classification.age import read_age, split_authors
from repulsive.lab.systems.classification.generated import Review, generate
from repulsive.lab.systems.classification.reviews import STARS, read_reviews, split
from repulsive.lab.text.inputs import checksums, find_file, find_parts
from repulsive.lab.text.prepared import PARTS
from repulsive.lab.text.tsv import Examples, read_tsv

YELP = "yelp_academic_dataset_review.json"
YELP_SIZES = {"train": 500_000, "dev": 2_000, "test": 2_000}  # the paper's


@dataclass(frozen=True)
class RawPart:
    """Texts and labels of one data split, before tokenisation.

    Args:
        texts: one list, or two of the same length: premises and hypotheses.
        labels: class index of each text or pair.
        skipped: number of bad lines left out.
        unlabelled: number of pairs left out because annotators did not agree.
        reviews: for generated texts, the reviews with their evidence.
    """

    texts: tuple[list[str], ...]
    labels: Sequence[int]
    skipped: int = 0
    unlabelled: int = 0
    reviews: Sequence[Review] = ()


@dataclass(frozen=True)
class Raw:
    """Texts and labels of a dataset, before tokenisation.

    Args:
        classes: names of the classes.
        parts: the data splits "train", "dev" and "test".
    """

    classes: tuple[str, ...]
    parts: dict[str, RawPart]


@dataclass(frozen=True)
class Source:
    """Files that were found but not read yet.

    Args:
        sums: SHA-256 of each file.
        read: function that reads the files.
        longest: default maximum length of a text in words; None: unlimited.
        is_tokenized: the words of the texts are separated by single spaces already.
    """

    sums: dict[str, str]
    read: Callable[[], Raw]
    longest: int | None
    is_tokenized: bool = False


def find_yelp(data: Path, sizes: dict[str, int], seed: int, limit: int) -> Source:
    """Find Yelp's own JSON file, or one TSV file per data split.

    Args:
        data: the folder, or the JSON file itself.
        sizes: number of reviews in some data splits, used for the JSON file only; `YELP_SIZES` has the defaults.
        seed: random seed of the sample and of the split.
        limit: number of bad lines that may be skipped in a file.
    """
    whole = data if data.is_file() else find_file(data, YELP)
    if whole is not None:
        return Source(checksums([whole], whole.parent), partial(_sample, whole, YELP_SIZES | sizes, seed, limit), 200)
    if sizes:
        raise DataError(f"{data}: no {YELP}; --train, --dev and --test are sizes of samples from that file")
    return _find_tsv(data, lambda path, classes: read_reviews(path, limit=limit), other=YELP)


def _sample(path: Path, sizes: dict[str, int], seed: int, limit: int) -> Raw:
    """Draw a random sample of reviews and split it at random."""
    if min(sizes.values()) < 1:
        raise DataError(f"sizes {list(sizes.values())}: every part needs at least one review")
    total = sum(sizes.values())
    reviews = read_reviews(path, most=total, seed=seed, limit=limit)
    if len(reviews) < total:
        wanted = " + ".join(f"{size:,}" for size in sizes.values())
        advice = "choose smaller sizes with --train, --dev and --test"
        raise DataError(f"{path}: has {len(reviews):,} reviews, expected {wanted}; {advice}")
    dev, test, train = split(reviews, (sizes["dev"], sizes["test"]), seed)
    parts = {name: RawPart((part.texts,), part.labels) for name, part in (("dev", dev), ("test", test))}
    return Raw(STARS, {"train": RawPart((train.texts,), train.labels, reviews.skipped), **parts})


def find_age(data: Path, dev: float, seed: int, limit: int) -> Source:
    """Find the PAN folders, or the TSV files, of the training and the test set.

    Args:
        data: the folder with both sets.
        dev: share of the training texts that become the development set; no author is in both.
        seed: random seed for the choice of authors.
        limit: number of bad lines that may be skipped in a file.
    """
    if not 0 < dev < 1:
        raise DataError(f"dev={dev:g}: expected the share of the training texts that dev takes, between 0 and 1")
    if (data / "train").is_dir() and (data / "test").is_dir():
        places = {name: data / name for name in ("train", "test")}
        files = [path for folder in places.values() for path in folder.iterdir() if path.is_file()]
    else:
        places = find_parts(data, ["{}.tsv"], ("train", "test"), other="PAN folders train/ and test/")
        files = list(places.values())

    def read() -> Raw:
        whole = read_age(places["train"], limit=limit)
        train, held_out = split_authors(whole, dev, seed)
        test = read_age(places["test"], classes=whole.classes, limit=limit)
        parts = {"train": (train, whole.skipped), "dev": (held_out, 0), "test": (test, test.skipped)}
        raw = {name: RawPart((part.texts,), part.labels, skipped) for name, (part, skipped) in parts.items()}
        return Raw(whole.classes, raw)

    return Source(checksums(files, data), read, 64)


def find_snli(data: Path, limit: int) -> Source:
    """Find the official JSON lines, or one TSV file per data split."""
    files = find_parts(data, ["snli_1.0_{}.jsonl", "{}.tsv"])

    def read() -> Raw:
        parts = {}
        for name, path in files.items():
            pairs = snli.read_snli(path, limit=limit)
            texts = ([plain_quotes(text) for text in side] for side in (pairs.premises, pairs.hypotheses))
            parts[name] = RawPart(tuple(texts), pairs.labels, pairs.skipped, pairs.unlabelled)
        return Raw(snli.CLASSES, parts)

    return Source(checksums(list(files.values()), data), read, 64)


def plain_quotes(text: str) -> str:
    """Replace Penn Treebank quotation marks by plain ones.

    In some copies of SNLI one data split is tokenised and the others are plain text. spaCy gives the same words for
    both, except for these quotation marks, which would be unknown words.

    Example:
        >>> plain_quotes("A sign says `` no '' .")
        'A sign says " no " .'
    """
    return text.replace("``", '"').replace("''", '"')


def find_labelled_tsv(data: Path, label: str | int, text: str | int, header: bool | None, limit: int) -> Source:
    """Find one TSV file per data split, with columns of labels and texts; for the arguments see `tsv.read_tsv`."""

    def read(path: Path, classes: tuple[str, ...] | None) -> Examples:
        return read_tsv(path, label, text, header=header, classes=classes, limit=limit)

    return _find_tsv(data, read)


def _find_tsv(data: Path, read: Callable[[Path, tuple[str, ...] | None], Examples], other: str = "") -> Source:
    files = find_parts(data, ["{}.tsv"], other=other)

    def read_all() -> Raw:
        train = read(files["train"], None)
        examples = {"train": train} | {name: read(files[name], train.classes) for name in PARTS[1:]}
        parts = {name: RawPart((part.texts,), part.labels, part.skipped) for name, part in examples.items()}
        return Raw(train.classes, parts)

    return Source(checksums(list(files.values()), data), read_all, 200)


def generate_reviews(train: int, dev: int, test: int, aspects: tuple[int, int], filler: int, seed: int) -> Source:
    """Generate reviews whose evidence is known; `generated.generate` explains `aspects` and `filler`."""
    if min(train, dev, test) < 1 or filler < 0:
        values = f"train={train}, dev={dev}, test={test}, filler={filler}"
        raise DataError(f"{values}: every part needs a review, and filler cannot be negative")
    try:
        made = generate(test + dev + train, seed, aspects=(aspects[0], aspects[1]), filler=filler)
    except ValueError as error:
        raise DataError(str(error)) from None
    # The training set is generated last so that dev and test do not depend on its size.
    reviews = {"train": made[test + dev :], "dev": made[test : test + dev], "test": made[:test]}
    parts, sums = {}, {}
    for name, some in reviews.items():
        texts = [review.text for review in some]
        parts[name] = RawPart((texts,), [review.stars - 1 for review in some], reviews=some)
        sums[f"generated {name}"] = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    return Source(sums, lambda: Raw(STARS, parts), None, is_tokenized=True)


def find_movie_reviews(data: Path, seed: int, limit: int) -> Source:
    """Return a source that downloads the movie reviews when it is read, unless the folder has them."""

    def read() -> Raw:
        snippets = movie_reviews.read_movie_reviews(movie_reviews.fetch(data), limit=limit)
        parts = movie_reviews.split_snippets(snippets, seed=seed)
        raw = {name: RawPart((part.texts,), part.labels) for name, part in parts.items()}
        return Raw(snippets.classes, raw)

    return Source({movie_reviews.ARCHIVE: movie_reviews.SHA256}, read, 64)
