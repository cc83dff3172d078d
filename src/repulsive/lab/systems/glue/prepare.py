"""GLUE files to a prepared folder: WordPiece, cut to length, with labels that may be points.

    prepare("glue", "data/glue", "prepared/glue/cola", glue_task="cola", vocabulary="vocab.txt")

The official development set is the part "test"; "dev" is the same, or some of train that is held out. The official test
sets have no labels: they are the part "predict", for submissions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from repulsive.errors import DataError
from repulsive.lab.systems.glue.data import (
    PREDICT,
    GlueTask,
    cut_pair,
    find_glue,
    read_glue,
    stops_to_drop,
    task_named,
    without_stops,
)
from repulsive.lab.text.prepared import Part, Prepared
from repulsive.lab.text.raw import Raw, RawPart, Source, sums_of
from repulsive.lab.text.tokenizing import Progress
from repulsive.lab.text.tokens import Ragged
from repulsive.lab.text.wordpiece import FILE, UNKNOWN, WordPieces

if TYPE_CHECKING:
    from repulsive.lab.text.plan import Plan

LONGEST = 128  # pieces of a text or pair, [CLS] and [SEP] included
STOPS = ("auto", "keep", "final", "all")
INDICES = "indices.json"
DEFAULTS: dict[str, Any] = {"held_out": 0.0, "stops": "auto"}


def find_source(
    data: Path, seed: int, limit: int, name: str, vocabulary: str | Path | None, held_out: float, stops: str
) -> Source:
    """A task's files.

    Args:
        data: the folder of the benchmark, or of the task.
        seed: of what is held out.
        limit: bad lines that may be skipped in a file.
        name: of the task.
        vocabulary: a file of one piece a line.
        held_out: share of train that "dev" takes; 0: none, and "dev" is what "test" is.
        stops: full stops that texts lose: "final", "all", none ("keep"), or, of MNLI, as many as those of train have
            lost ("auto").

    Raises:
        DataError: a setting that cannot be, or a missing file.
    """
    task = task_named(name)
    if vocabulary is None:
        raise DataError("task 'glue' needs the pieces of the model: give --vocabulary vocab.txt, or its folder")
    if not 0 <= held_out < 1:
        raise DataError(f"held_out={held_out:g}: it is the share of train that dev takes, from 0 and below 1")
    if stops not in STOPS:
        raise DataError(f"stops={stops!r}: choose one of {', '.join(STOPS)}")
    words = vocabulary_file(vocabulary)
    files = find_glue(data, task)
    sums = sums_of(list(files.values()), data) | {FILE: sums_of([words], words.parent)[words.name]}

    def read() -> Raw:
        parts = {part: _read(path, task, part, limit) for part, path in files.items()}
        parts["dev"] = parts["test"]
        if held_out:
            parts["train"], parts["dev"] = _split(parts["train"], held_out, seed)
        order = sorted(parts, key=["train", "dev", "test", *parts].index)
        return Raw(task.classes, {part: parts[part] for part in order})

    return Source(sums, read, LONGEST, vocabulary=words)


def vocabulary_file(given: str | Path) -> Path:
    """The file of a vocabulary, given by its path or by its folder's."""
    path = Path(given)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise DataError(f"{path}: no such file; it should hold the pieces of the model, one a line")
    return path


def check(settings: Any) -> None:
    """Refuse settings that mean nothing here.

    Raises:
        DataError: there are vectors, a tokenizer of another task, or no room for any text.
    """
    if settings.vectors is not None:
        raise DataError("task 'glue' starts from a model: --vectors would not be used")
    if settings.tokenizer not in (None, "wordpiece"):
        raise DataError(f"tokenizer {settings.tokenizer!r}: task 'glue' takes wordpiece")
    if settings.longest is not None and settings.longest < 8:
        raise DataError(f"longest={settings.longest}: at least 8 pieces")


def without_folders(options: dict[str, Any]) -> dict[str, Any]:
    """Options as the manifest has them: the vocabulary is known by its checksum."""
    found = DEFAULTS | {name: value for name, value in options.items() if name != "vocabulary"}
    return found | {"glue_task": task_named(found["glue_task"]).name}


def run(made: Plan, tell: Progress) -> Prepared:
    """Carry out a plan for GLUE; see `prepare.run`."""
    tell("reading", 0, 0)
    task = task_named(made.options["glue_task"])
    raw = made.source.read()
    stops = made.options["stops"]
    if stops == "auto":
        tried = task.name == "mnli"
        stops = stops_to_drop(_texts(raw.parts["train"]), _texts(raw.parts["test"])) if tried else "keep"
    assert made.source.vocabulary is not None
    pieces = WordPieces.read(made.source.vocabulary, made.settings.lowercase)
    parts, cut = {}, {}
    for name, part in raw.parts.items():
        tell(f"pieces of {name}", 0, 0)
        parts[name], cut[name] = _numbered(part, pieces, stops, made.settings.longest or LONGEST)
    indices = {name: list(part.indices) for name, part in raw.parts.items() if part.indices}
    running = {name: torch.cat([side.values for side in part.sentences]) for name, part in parts.items()}
    manifest = {
        "settings": made.asked,
        "sources": made.sums,
        "versions": {"tokenizers": version("tokenizers")},
        "rows": {name: len(part) for name, part in parts.items()},
        "skipped": {name: part.skipped for name, part in raw.parts.items()},
        "unlabelled": {name: len(part.labels) if name.startswith(PREDICT) else 0 for name, part in raw.parts.items()},
        "cut": cut,
        "unknown": {name: float((x == pieces.index[UNKNOWN]).double().mean()) for name, x in running.items()},
        "coverage": None,
        "stops": stops,
    }
    extra = {FILE: pieces.as_bytes(), INDICES: json.dumps(indices).encode()}
    return Prepared(made.out, "glue", raw.classes, pieces.as_vocabulary(), None, parts, manifest, extra).save()


def _read(path: Path, task: GlueTask, part: str, limit: int) -> RawPart:
    rows = read_glue(path, task, labelled=not part.startswith(PREDICT), limit=limit)
    return RawPart(rows.texts, rows.labels, rows.skipped, indices=rows.indices)


def _split(train: RawPart, share: float, seed: int) -> tuple[RawPart, RawPart]:
    """Some of train held out, the rest in its order."""
    count = len(train.labels)
    held = round(count * share)
    if not 0 < held < count:
        raise DataError(f"held_out={share:g} of {count} rows leaves a part without any")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = (sorted(order[held:]), sorted(order[:held]))
    first, second = (
        RawPart(tuple([side[i] for i in some] for side in train.texts), [train.labels[i] for i in some])
        for some in chosen
    )
    return RawPart(first.texts, first.labels, train.skipped), second


def _texts(part: RawPart) -> list[str]:
    return [text for side in part.texts for text in side]


def _numbered(part: RawPart, pieces: WordPieces, stops: str, longest: int) -> tuple[Part, int]:
    """Pieces of each text without [CLS] and [SEP], for which room is left; and how many rows were cut."""
    sides = [pieces.encode([without_stops(text, stops) for text in side]) for side in part.texts]
    room, cut = longest - 1 - len(sides), 0
    for row in range(len(part.labels)):
        kept: tuple[list[int], ...]
        if len(sides) == 2:
            kept = cut_pair(sides[0][row], sides[1][row], room)
        else:
            kept = (sides[0][row][:room],)
        cut += sum(map(len, kept)) < sum(len(side[row]) for side in sides)
        for side, ids in zip(sides, kept, strict=True):
            side[row] = ids
    dtype = torch.float32 if any(isinstance(label, float) for label in part.labels) else torch.int64
    return Part(tuple(map(_ragged, sides)), torch.tensor(part.labels, dtype=dtype)), cut


def _ragged(rows: Sequence[Sequence[int]]) -> Ragged:
    values = torch.tensor([piece for row in rows for piece in row], dtype=torch.int32)
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return Ragged(values, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))
