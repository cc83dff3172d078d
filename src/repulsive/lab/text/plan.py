"""What is to be prepared, from which files, in which way; and whether it is there already."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from repulsive.errors import DataError
from repulsive.lab.systems.glue import prepare as prepare_glue
from repulsive.lab.systems.translation import parallel
from repulsive.lab.text.claims import recover
from repulsive.lab.text.folders import check_replaceable, read_manifest, understood
from repulsive.lab.text.prepared import Prepared
from repulsive.lab.text.raw import Source, sums_of
from repulsive.lab.text.sources import find


@dataclass(frozen=True)
class Settings:
    """What decides the numbers that come out, whatever the task.

    Args:
        tokenizer: "spacy" or "regex"; None: spaCy's, or none where the texts are words already. Of translation "moses",
            its default, "normalized" or "none".
        lowercase: lower-case the texts.
        minimum: how often a word occurs in the training part to be in the vocabulary; of translation, a pair of pieces.
        most: words in the vocabulary, the two reserved ones included; None: all. Of translation pieces, by default
            10,000.
        longest: words kept of a sentence; None: as the task has it (`raw.Source`). Of translation, training pairs with
            more are dropped.
        vectors: a file of GloVe vectors.
        size: of a vector; None: as the file's first line has it.
        half_vectors: store them in float16.
        seed: of what is drawn: samples, development authors, vectors of words that have none.
        limit: bad lines that may be skipped in a file.
    """

    tokenizer: str | None = None
    lowercase: bool = True
    minimum: int = 2
    most: int | None = None
    longest: int | None = None
    vectors: Path | None = None
    size: int | None = None
    half_vectors: bool = False
    seed: int = 0
    limit: int = 20

    def __post_init__(self) -> None:
        least = {"minimum": 1, "most": 3, "longest": 1, "size": 1, "limit": 0}
        for name, value in least.items():
            given = getattr(self, name)
            if given is not None and given < value:
                raise DataError(f"{name}={given}: at least {value}")
        if self.vectors is None and (self.size is not None or self.half_vectors):
            raise DataError("size and half_vectors are about vectors, and no file of vectors is given")


@dataclass(frozen=True)
class Plan:
    """A preparation that can begin: the task is known, its files are found, nothing is read.

    Args:
        task: its name.
        out: the folder to make.
        settings: what is asked for.
        options: what is asked for of the task alone.
        source: the task's files.
        sums: SHA-256 of all files, the vectors' included.
    """

    task: str
    out: Path
    settings: Settings
    options: dict[str, Any]
    source: Source
    sums: dict[str, str]

    @property
    def asked(self) -> dict[str, Any]:
        """Settings and options as the manifest has them."""
        file = self.settings.vectors
        plain = asdict(self.settings) | {"vectors": file.name if file else None} | self.options
        return dict(json.loads(json.dumps(plain)))

    def already(self) -> Prepared | None:
        """What is in the folder, if it was made from the same files in the same way; None if there is nothing.

        Raises:
            DataError: it was made otherwise, is damaged, or is something else.
        """
        return Prepared.load(self.out) if is_made(self.out, self.task, self.asked, self.sums) else None


def is_made(out: Path, task: str, asked: dict[str, Any], sums: dict[str, str]) -> bool:
    """Is a folder there that was made from these files in this way?

    Args:
        out: the folder.
        task: its task.
        asked: settings as its manifest would have them.
        sums: SHA-256 of the files.

    Raises:
        DataError: it was made otherwise, or is something else.
    """
    recover(out)
    check_replaceable(out)
    if not out.is_dir() or not any(out.iterdir()):
        return False
    manifest = read_manifest(out)
    with understood(out):
        was, had = {"task": manifest.get("task"), **manifest.get("settings", {})}, dict(manifest.get("sources", {}))
    now = {"task": task, **asked}
    changed = [f"{key} {was.get(key)!r}, not {now.get(key)!r}" for key in now | was if was.get(key) != now.get(key)]
    if not changed:
        changed = [f"another {name}" for name in sums | had if had.get(name) != sums.get(name)]
    if changed:
        told = "; ".join(changed[:3])
        raise DataError(f"{out}: was prepared with {told}. Choose another --out, or replace it with --force")
    return True


def plan(task: str, data: str | Path | None, out: str | Path, **settings: Any) -> Plan:
    """Find the files of a task and check what is asked for.

    Args:
        task: one of `sources.TASKS`.
        data: the folder its files are in; of a task that is fetched, where to, `downloads` beside `out` by default.
        out: the folder to make.
        settings: fields of `Settings`, and options of the task's own (`sources.options_of`).

    Raises:
        DataError: a task, option or value that cannot be, or a file that is missing.
    """
    out = Path(out)
    names = {field.name for field in fields(Settings)}
    if settings.get("vectors") is not None:
        settings["vectors"] = Path(settings["vectors"])
    asked = Settings(**{name: value for name, value in settings.items() if name in names})
    options = {name: value for name, value in settings.items() if name not in names}
    if task == "movie-reviews" and data is None:
        data = out.parent / "downloads"
    source = find(task, None if data is None else Path(data), asked.seed, asked.limit, options)
    if source.in_words and asked.tokenizer is not None:
        raise DataError(f"task {task!r} is made of words: the tokenizer {asked.tokenizer!r} would not be used")
    usual = "spacy"
    if task == "translation":
        parallel.check(asked)
        usual, options = "moses", parallel.DEFAULTS | parallel.without_folders(options)
        asked = replace(asked, most=asked.most or parallel.PIECES)
    elif task == "glue":
        prepare_glue.check(asked)
        usual, options = "wordpiece", prepare_glue.without_folders(options)
    asked = replace(
        asked,
        tokenizer=None if source.in_words else asked.tokenizer or usual,
        longest=asked.longest or source.longest,
    )
    sums = source.sums | (sums_of([asked.vectors], asked.vectors.parent) if asked.vectors else {})
    return Plan(task, out, asked, options, source, sums)
