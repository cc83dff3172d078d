"""Prepare parallel texts for translation: tokenise, clean, and learn one byte-pair encoding for both languages.

    prepare("translation", "data/multi30k", "prepared/multi30k", source="de", target="en", most=8_000)

Only training pairs are cleaned. All pairs of dev, test and further test sets are kept, so that scores stay comparable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from repulsive.errors import DataError
from repulsive.lab.systems.translation.datasets import LONGEST, PIECES, RATIO
from repulsive.lab.systems.translation.parallel import clean, find_pairs, read_pair
from repulsive.lab.text.dataset import Plan
from repulsive.lab.text.inputs import checksums
from repulsive.lab.text.pieces import FILE, TOKENIZERS, Pieces, learn, tokenizer_name
from repulsive.lab.text.prepared import PARTS, Part, Prepared
from repulsive.lab.text.progress import Progress
from repulsive.lab.text.settings import Settings
from repulsive.lab.text.summary import summarize as summarize_parts
from repulsive.lab.text.tokenizing import tokenize
from repulsive.lab.text.tokens import UNK, tokenizer

REFERENCES = "references.json"
MOST_PIECES = 1_000  # per sentence; models have positions for a few more pieces than this
Files = Mapping[str, tuple[Path, Path]]


def plan_translation(
    data: Path,
    out: Path,
    *,
    source: str = "de",
    target: str = "en",
    ratio: float = RATIO,
    pairs: int | None = None,
    also: Mapping[str, str | Path] | None = None,
    **settings: Any,
) -> Plan[Prepared]:
    """Plan the preparation of a language pair.

    Args:
        data: the folder with the parallel files.
        out: the folder to make.
        source: language to translate from, as file names end.
        target: language to translate to.
        ratio: training pairs are dropped if one side has more than this many times the words of the other.
        pairs: number of training pairs to use, from the first on, counted before cleaning; None: all.
        also: further test sets, name -> path without the language's ending.
        settings: fields of `Settings`. `minimum` and `most` apply to pieces; training pairs longer than `longest` are
            dropped.

    Raises:
        DataError: an option is invalid, or a file is missing.
    """
    shared = Settings(**settings)
    if shared.vectors is not None:
        raise DataError("dataset 'translation' learns its own vectors; leave out --vectors")
    if shared.tokenizer not in (None, *TOKENIZERS):
        raise DataError(f"tokenizer {shared.tokenizer!r}: dataset 'translation' takes {', '.join(TOKENIZERS)}")
    shared = replace(
        shared,
        tokenizer=shared.tokenizer or TOKENIZERS[0],
        most=shared.most or PIECES,
        longest=shared.longest or LONGEST,
    )
    if not ratio >= 1:
        raise DataError(f"ratio={ratio:g}: expected at least 1")
    if pairs is not None and pairs < 1:
        raise DataError(f"pairs={pairs}: expected at least 1")
    files = find_pairs(data, source, target, also)
    sums = checksums([path for part in PARTS for path in files[part]], data)
    for name in also or {}:
        folder = files[name][0].parent
        sums |= {f"{name}/{file}": digest for file, digest in checksums(files[name], folder).items()}
    options: dict[str, Any] = {"source": source, "target": target, "ratio": ratio}
    if also:  # stored only if given, and without folders, so that moved files count as the same
        options["also"] = {name: Path(base).name for name, base in also.items()}
    if pairs is not None:
        options["pairs"] = pairs
    write = partial(_write, shared, files, (source, target), ratio, pairs)
    return Plan("translation", out, shared.stored(options), sums, write, Prepared.load, summarize)


def _write(
    settings: Settings,
    files: Files,
    languages: tuple[str, str],
    ratio: float,
    pairs: int | None,
    plan: Plan[Prepared],
    jobs: int | None,
    progress: Progress,
) -> Prepared:
    name, lowercase, longest = str(settings.tokenizer), settings.lowercase, settings.longest or LONGEST
    tokenizer(tokenizer_name(name, "en"))  # fails here, before a long read, if the tokenizer is not installed
    progress("reading", 0, 0)
    texts = {part: read_pair(*paths) for part, paths in files.items()}
    texts["train"] = texts["train"][0][:pairs], texts["train"][1][:pairs]
    words: dict[str, list[list[list[str]]]] = {part: [] for part in texts}
    for side, language in enumerate(languages):
        whole = [text for sides in texts.values() for text in sides[side]]
        split, _ = tokenize(whole, tokenizer_name(name, language), lowercase=lowercase, jobs=jobs, progress=progress)
        for part, sides in texts.items():
            words[part].append(split[: len(sides[side])])
            split = split[len(sides[side]) :]
    total = len(words["train"][0])
    words["train"] = clean(words["train"], longest, ratio)
    if not words["train"][0]:
        raise DataError(f"translation: cleaning left none of {total} training pairs; raise --longest or --ratio")
    progress("pieces", 0, 0)
    vocabulary, model = learn((s for side in words["train"] for s in side), settings.most or PIECES, settings.minimum)
    pieces = Pieces(*languages, name, lowercase, vocabulary, model)
    parts = {part: _encode(pieces, sides) for part, sides in words.items()}
    references = {
        part: {"text": texts[part][1], "words": [" ".join(s) for s in words[part][1]]}
        for part in parts
        if part != "train"
    }
    extra = {FILE: model, REFERENCES: json.dumps(references, ensure_ascii=False).encode()}
    packages = ("sacremoses", "tokenizers") if name != "none" else ("tokenizers",)
    versions = {package: version(package) for package in packages}
    manifest = plan.manifest() | {"versions": versions} | _counts(parts, total)
    return Prepared(plan.out, plan.dataset, (), vocabulary, None, parts, manifest, extra).save()


def _encode(pieces: Pieces, sides: list[list[list[str]]]) -> Part:
    sentences = tuple(pieces.encode(side, MOST_PIECES) for side in sides)
    return Part(sentences, torch.zeros(len(sentences[0]), dtype=torch.int64))


def _counts(parts: dict[str, Part], total: int) -> dict[str, Any]:
    """Count pairs and pieces for the manifest; `total` is the number of training pairs before cleaning."""
    rows = {name: len(part) for name, part in parts.items()}
    ids = {name: torch.cat([side.values for side in part.sentences]) for name, part in parts.items()}
    return {
        "rows": rows,
        "skipped": dict.fromkeys(parts, 0) | {"train": total - rows["train"]},
        "unlabelled": dict.fromkeys(parts, 0),
        "cut": {name: int((part.lengths > MOST_PIECES).sum()) for name, part in parts.items()},
        "unknown": {name: float((part == UNK).double().mean()) for name, part in ids.items()},
        "coverage": None,
    }


def summarize(prepared: Prepared) -> str:
    """Describe the prepared data splits, the languages and the files."""
    manifest = prepared.manifest
    settings = manifest["settings"]
    files = f"{settings['source']} to {settings['target']}, from {', '.join(manifest['sources'])}"
    return f"{summarize_parts(prepared)}\n{files}"
