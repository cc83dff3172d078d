"""Prepare classification datasets: tokenise, build a vocabulary from the training set, look up word vectors.

    prepare("yelp", "data/yelp", "prepared/yelp", vectors="glove.840B.300d.txt", size=300)

The vocabulary counts only words that are kept when long texts are cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from repulsive.errors import DataError
from repulsive.lab.systems.classification.generated import pack_evidence
from repulsive.lab.systems.classification.sources import (
    Raw,
    Source,
    find_age,
    find_labelled_tsv,
    find_movie_reviews,
    find_snli,
    find_yelp,
    generate_reviews,
)
from repulsive.lab.text.dataset import Plan
from repulsive.lab.text.glove import read_glove
from repulsive.lab.text.inputs import checksums
from repulsive.lab.text.prepared import Part, Prepared
from repulsive.lab.text.progress import Progress
from repulsive.lab.text.settings import Settings
from repulsive.lab.text.summary import summarize as summarize_parts
from repulsive.lab.text.tokenizing import tokenize
from repulsive.lab.text.tokens import UNK, Vocabulary, tokenizer

Sentences = list[list[str]]


def plan_yelp(
    data: Path, out: Path, *, train: int | None = None, dev: int | None = None, test: int | None = None, **settings: Any
) -> Plan[Prepared]:
    """Plan the preparation of Yelp reviews."""
    shared = Settings(**settings)
    sizes = {name: size for name, size in (("train", train), ("dev", dev), ("test", test)) if size is not None}
    return _plan("yelp", out, shared, sizes, find_yelp(data, sizes, shared.seed, shared.limit))


def plan_age(data: Path, out: Path, *, dev: float | None = None, **settings: Any) -> Plan[Prepared]:
    """Plan the preparation of texts that are labelled with age groups."""
    shared = Settings(**settings)
    source = find_age(data, 0.1 if dev is None else dev, shared.seed, shared.limit)
    return _plan("age", out, shared, {"dev": dev}, source)


def plan_snli(data: Path, out: Path, **settings: Any) -> Plan[Prepared]:
    """Plan the preparation of SNLI."""
    shared = Settings(**settings)
    return _plan("snli", out, shared, {}, find_snli(data, shared.limit))


def plan_tsv(
    data: Path,
    out: Path,
    *,
    label: str | int | None = None,
    text: str | int | None = None,
    header: bool | None = None,
    **settings: Any,
) -> Plan[Prepared]:
    """Plan the preparation of labelled texts in TSV files."""
    shared = Settings(**settings)
    columns = "label" if label is None else label, "text" if text is None else text
    source = find_labelled_tsv(data, *columns, header, shared.limit)
    return _plan("tsv", out, shared, {"label": label, "text": text, "header": header}, source)


def plan_reviews(
    data: None,
    out: Path,
    *,
    train: int | None = None,
    dev: int | None = None,
    test: int | None = None,
    aspects: tuple[int, int] | None = None,
    filler: int | None = None,
    **settings: Any,
) -> Plan[Prepared]:
    """Plan the generation of reviews with known evidence."""
    shared = Settings(**settings)
    options = {"train": train, "dev": dev, "test": test, "aspects": aspects, "filler": filler}
    defaults: dict[str, Any] = {"train": 10_000, "dev": 1_000, "test": 1_000, "aspects": (3, 5), "filler": 1}
    source = generate_reviews(**defaults | _given(options), seed=shared.seed)
    return _plan("reviews", out, shared, options, source)


def plan_movie_reviews(data: Path | None, out: Path, **settings: Any) -> Plan[Prepared]:
    """Plan the download and preparation of movie reviews, by default into the folder `downloads` beside `out`."""
    shared = Settings(**settings)
    source = find_movie_reviews(data or out.parent / "downloads", shared.seed, shared.limit)
    return _plan("movie-reviews", out, shared, {}, source)


def _plan(name: str, out: Path, settings: Settings, options: Mapping[str, Any], source: Source) -> Plan[Prepared]:
    if source.is_tokenized and settings.tokenizer is not None:
        raise DataError(f"dataset {name!r} is tokenised already; leave out --tokenizer {settings.tokenizer}")
    settings = replace(
        settings,
        tokenizer=None if source.is_tokenized else settings.tokenizer or "spacy",
        longest=settings.longest or source.longest,
        vectors=None if settings.vectors is None else Path(settings.vectors),
    )
    vectors = settings.vectors
    sums = source.sums | (checksums([vectors], vectors.parent) if vectors else {})
    write = partial(_write, settings, source)
    return Plan(name, out, settings.stored(_given(options)), sums, write, Prepared.load, summarize)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the options that were not given, because manifests store only given options."""
    return {name: value for name, value in options.items() if value is not None}


def _write(settings: Settings, source: Source, plan: Plan[Prepared], jobs: int | None, progress: Progress) -> Prepared:
    if settings.tokenizer is not None:
        tokenizer(settings.tokenizer)  # fails here, before a long read, if the tokenizer is not installed
    progress("reading", 0, 0)
    raw = source.read()
    if raw.classes and len(set(raw.parts["train"].labels)) < 2:
        raise DataError(f"{plan.dataset}: all training texts are of one class; a classifier needs at least two")
    words, cut = _tokenize(raw, settings, jobs, progress)
    progress("numbering", 0, 0)
    train = (sentence for side in words["train"] for sentence in side)
    vocabulary = Vocabulary.build(train, minimum=settings.minimum, most=settings.most)
    parts = {}
    for name, part in raw.parts.items():
        evidence = pack_evidence(part.reviews, settings.longest) if part.reviews else None
        parts[name] = Part(tuple(map(vocabulary.encode, words[name])), torch.tensor(part.labels), evidence)
    ids = {name: torch.cat([side.values for side in part.sentences]) for name, part in parts.items()}
    table = coverage = None
    if settings.vectors is not None:
        progress("vectors", 0, 0)
        vectors = read_glove(settings.vectors, vocabulary.words, settings.size, seed=settings.seed)
        table = vectors.table  # [V, E]
        coverage = {"types": vectors.coverage, "words": vectors.coverage_of(ids["train"])}
    manifest = plan.manifest() | {
        "versions": {"spacy": version("spacy")} if settings.tokenizer == "spacy" else {},
        "rows": {name: len(part) for name, part in parts.items()},
        "skipped": {name: part.skipped for name, part in raw.parts.items()},
        "unlabelled": {name: part.unlabelled for name, part in raw.parts.items()},
        "cut": cut,
        "unknown": {name: float((part == UNK).double().mean()) for name, part in ids.items()},
        "coverage": coverage,
    }
    prepared = Prepared(plan.out, plan.dataset, raw.classes, vocabulary, table, parts, manifest)
    return prepared.save(half_vectors=settings.half_vectors)


def _tokenize(
    raw: Raw, settings: Settings, jobs: int | None, progress: Progress
) -> tuple[dict[str, list[Sentences]], dict[str, int]]:
    """Return the words of each sentence by data split and side of a pair, and how many sentences were cut per split."""
    texts = [text for part in raw.parts.values() for side in part.texts for text in side]
    longest = settings.longest
    if settings.tokenizer is None:
        whole = [text.split(" ") for text in texts]
        words, counts = [sentence[:longest] for sentence in whole], [len(sentence) for sentence in whole]
    else:
        words, counts = tokenize(
            texts, settings.tokenizer, lowercase=settings.lowercase, longest=longest, jobs=jobs, progress=progress
        )
    if 0 in counts:
        raise DataError(f"{counts.count(0)} texts have no words; the first is {texts[counts.index(0)][:40]!r}")
    sentences: dict[str, list[Sentences]] = {}
    cut = dict.fromkeys(raw.parts, 0)
    start = 0
    for name, part in raw.parts.items():
        sentences[name] = []
        for side in part.texts:
            end = start + len(side)
            sentences[name].append(words[start:end])
            cut[name] += sum(count > longest for count in counts[start:end]) if longest else 0
            start = end
    return sentences, cut


def summarize(prepared: Prepared) -> str:
    """Describe the prepared data splits and the coverage of the word vectors."""
    text, coverage = summarize_parts(prepared), prepared.manifest["coverage"]
    if coverage is not None:
        text += f"; vectors for {coverage['types']:.1%} of the vocabulary, {coverage['words']:.1%} of running words"
    return text
