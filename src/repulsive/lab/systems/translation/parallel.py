"""Parallel files, found, read, cleaned and cut into pieces: line n of one is the translation of line n of the other.

    prepare("translation", "data/multi30k", "prepared/multi30k", source="de", target="en", most=8_000)

Training pairs are cleaned; those of dev, test and further test sets all stay, or numbers would not compare.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from repulsive.errors import DataError
from repulsive.lab.text.lines import read_lines
from repulsive.lab.text.pieces import FILE, TOKENIZERS, Pieces, learn, tokenizer_name
from repulsive.lab.text.prepared import PARTS, Part, Prepared
from repulsive.lab.text.raw import Raw, RawPart, Source, find_file, sums_of
from repulsive.lab.text.tokenizing import Progress, tokenize
from repulsive.lab.text.tokens import UNK, Vocabulary

if TYPE_CHECKING:
    from repulsive.lab.text.plan import Plan

# What the parts are called by fairseq's scripts for IWSLT14 and WMT14, Multi30k, Tatoeba and Europarl.
NAMES = {
    "train": ("train", "train_partial"),
    "dev": ("dev", "valid", "val"),
    "test": ("test", "test_2016_flickr", "test2016"),
}
# No names for a further test set: a prepared folder has files of these names, or a result entries.
TAKEN = (*PARTS, "vectors", "label", "best_step", "steps", "seconds", "averaged", "notes", "sha256")
REFERENCES = "references.json"
DEFAULTS = {"source": "de", "target": "en", "ratio": 9.0}  # the ratio is that of Moses' own script
PIECES = 10_000  # in the vocabulary, where nothing else is asked for
LONGEST = 175  # words of a training sentence, as fairseq's script for IWSLT14 has it
MOST_PIECES = 1_000  # of any sentence: models have positions for a few more


def find_pairs(
    folder: Path, source: str, target: str, ratio: float, also: Mapping[str, str | Path] | None = None
) -> Source:
    """The files of a language pair.

    Args:
        folder: where `train.de` and the others are, plain, xz or gzip; `NAMES` has the names that are known.
        source: language to translate from, as file names end.
        target: language to translate to.
        ratio: training pairs are dropped where one side has more than so many times the words of the other.
        also: further test sets, name -> path without the language's ending.

    Raises:
        DataError: files are missing, or the settings cannot be.
    """
    if source == target or not source or not target:
        raise DataError(f"source={source!r}, target={target!r}: give two different endings, such as de and en")
    if not ratio >= 1:
        raise DataError(f"ratio={ratio:g}: at least 1")
    found: dict[str, tuple[Path, Path]] = {}
    for part, names in NAMES.items():
        for name in names:
            pair = find_file(folder, f"{name}.{source}"), find_file(folder, f"{name}.{target}")
            if pair[0] is not None and pair[1] is not None:
                found[part] = (pair[0], pair[1])
                break
        else:
            known = " or ".join(names)
            raise DataError(
                f"{folder}: no {part} files in {source} and {target}; they are called {known}, with .{source} and "
                f".{target}, plain, .xz or .gz"
            )
    sums = sums_of([path for pair in found.values() for path in pair], folder)
    for name, base in (also or {}).items():
        pair = found[name] = find_further(name, Path(base), source, target)
        sums |= {f"{name}/{file}": digest for file, digest in sums_of(pair, pair[0].parent).items()}

    def read() -> Raw:
        texts = {part: read_pair(*paths) for part, paths in found.items()}
        return Raw((), {part: RawPart(sides, [0] * len(sides[0])) for part, sides in texts.items()})

    return Source(sums, read, LONGEST)


def find_further(name: str, base: Path, source: str, target: str) -> tuple[Path, Path]:
    """The two files of a further test set.

    Args:
        name: what it shall be called.
        base: its path, without the language's ending.
        source: language to translate from, as the file's name ends.
        target: language to translate to.

    Raises:
        DataError: a file is missing, or the name cannot be.
    """
    if not re.fullmatch("[a-z][a-z0-9_-]*", name):
        raise DataError(f"--also {name!r}: a name is a lower-case letter, then such letters, digits, - or _")
    if name in TAKEN:
        raise DataError(f"--also {name!r}: the name is taken; choose another")
    first, second = (find_file(base.parent, f"{base.name}.{language}") for language in (source, target))
    if first is None or second is None:
        missing = f"{base}.{source if first is None else target}"
        raise DataError(
            f"--also {name!r}: no file {missing}, plain, .xz or .gz; give the path without .{source} and .{target}"
        )
    return first, second


def read_pair(source: Path, target: Path) -> tuple[list[str], list[str]]:
    """The lines of two files that belong together; none may be skipped, or all after it would be misaligned.

    Raises:
        DataError: one is missing, empty, damaged or not UTF-8, or they have different numbers of lines.
    """
    sides = [[line.strip() for _, line in read_lines(path)] for path in (source, target)]
    for path, lines in zip((source, target), sides, strict=True):
        if not any(lines):
            raise DataError(f"{path}: empty file")
    if len(sides[0]) != len(sides[1]):
        short, long = sorted(((len(lines), path) for lines, path in zip(sides, (source, target), strict=True)))
        raise DataError(
            f"{short[1]}: ends after line {short[0]}, but {long[1]} has {long[0]} lines; line n of one must be the "
            "translation of line n of the other"
        )
    return sides[0], sides[1]


def run(made: Plan, jobs: int | None, tell: Progress) -> Prepared:
    """Carry out a plan for translation; see `prepare.run`."""
    settings, options = made.settings, made.options
    source, target = options["source"], options["target"]
    name, lowercase, longest = str(settings.tokenizer), settings.lowercase, settings.longest or LONGEST
    tell("reading", 0, 0)
    raw = made.source.read()
    words: dict[str, list[list[list[str]]]] = {part: [] for part in raw.parts}
    for side, language in enumerate((source, target)):
        texts = [text for part in raw.parts.values() for text in part.texts[side]]
        split, _ = tokenize(texts, tokenizer_name(name, language), lowercase=lowercase, jobs=jobs, progress=tell)
        for part, some in raw.parts.items():
            words[part].append(split[: len(some.labels)])
            split = split[len(some.labels) :]
    whole = len(words["train"][0])
    words["train"] = clean(words["train"], longest, options["ratio"])
    if not words["train"][0]:
        raise DataError(f"{made.task}: cleaning left none of {whole} training pairs; raise --longest or --ratio")
    tell("pieces", 0, 0)
    vocabulary, model = learn((s for side in words["train"] for s in side), settings.most or PIECES, settings.minimum)
    pieces = Pieces(source, target, name, lowercase, vocabulary, model)
    parts = {part: _numbered(pieces, sides) for part, sides in words.items()}
    references = {
        part: {"text": raw.parts[part].texts[1], "words": [" ".join(s) for s in words[part][1]]}
        for part in parts
        if part != "train"
    }
    extra = {FILE: model, REFERENCES: json.dumps(references, ensure_ascii=False).encode()}
    done = Prepared(made.out, made.task, (), vocabulary, None, parts, _manifest(made, parts, vocabulary, whole), extra)
    return done.save()


def clean(sides: list[list[list[str]]], longest: int, ratio: float) -> list[list[list[str]]]:
    """Pairs of which both sides have 1 to `longest` words, and neither more than `ratio` times the other's.

    Args:
        sides: words of the source sentences, and of the target sentences.
        longest: words of a sentence.
        ratio: of the longer to the shorter.
    """
    kept = [
        pair
        for pair in zip(*sides, strict=True)
        if (least := min(map(len, pair))) and (most := max(map(len, pair))) <= longest and most <= ratio * least
    ]
    return [[pair[side] for pair in kept] for side in range(len(sides))]


def without_folders(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as the manifest has them, so that the same files in another place are the same."""
    found = {name: value for name, value in options.items() if name != "also"}
    if also := options.get("also"):  # folders made before there was this option stay as they are
        found["also"] = {name: Path(base).name for name, base in also.items()}
    return found


def check(settings: Any) -> None:
    """Refuse settings that mean nothing here.

    Raises:
        DataError: there are vectors, or a tokenizer of another task.
    """
    if settings.vectors is not None:
        raise DataError("task 'translation' learns its vectors: --vectors would not be used")
    if settings.tokenizer not in (None, *TOKENIZERS):
        raise DataError(f"tokenizer {settings.tokenizer!r}: task 'translation' takes {', '.join(TOKENIZERS)}")


def _numbered(pieces: Pieces, sides: list[list[list[str]]]) -> Part:
    sentences = tuple(pieces.encode(side, MOST_PIECES) for side in sides)
    return Part(sentences, torch.zeros(len(sentences[0]), dtype=torch.int64))


def _manifest(made: Plan, parts: dict[str, Part], vocabulary: Vocabulary, whole: int) -> dict[str, Any]:
    rows = {name: len(part) for name, part in parts.items()}
    running = {name: torch.cat([side.values for side in part.sentences]) for name, part in parts.items()}
    packages = ("sacremoses", "tokenizers") if made.settings.tokenizer != "none" else ("tokenizers",)
    return {
        "settings": made.asked,
        "sources": made.sums,
        "versions": {name: version(name) for name in packages},
        "rows": rows,
        "skipped": dict.fromkeys(parts, 0) | {"train": whole - rows["train"]},
        "unlabelled": dict.fromkeys(parts, 0),
        "cut": {name: int((part.lengths > MOST_PIECES).sum()) for name, part in parts.items()},
        "unknown": {name: float((ids == UNK).double().mean()) for name, ids in running.items()},
        "coverage": None,
    }
