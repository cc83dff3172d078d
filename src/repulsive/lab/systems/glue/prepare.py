"""Prepare GLUE tasks: WordPiece ids, cut to length, with classes or scores as labels.

    prepare("glue", "data/glue", "prepared/glue/cola", glue_task="cola", vocabulary="vocab.txt")

The data split "test" is the official development set. The split "dev" is the same set, or a share of the
training set that is held out. The official test sets have no labels: they are the split "predict", for submissions.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from repulsive.errors import DataError
from repulsive.lab.systems.glue.data import (
    PREDICT,
    GlueRows,
    GlueTask,
    cut_pair,
    find_glue,
    read_glue,
    stops_to_drop,
    task_named,
    without_stops,
)
from repulsive.lab.systems.glue.datasets import LONGEST, STOPS
from repulsive.lab.text.dataset import Plan
from repulsive.lab.text.inputs import checksums
from repulsive.lab.text.prepared import Part, Prepared
from repulsive.lab.text.progress import Progress
from repulsive.lab.text.settings import Settings
from repulsive.lab.text.summary import summarize as summarize_parts
from repulsive.lab.text.tokens import Ragged
from repulsive.lab.text.wordpiece import FILE, UNKNOWN, WordPieces

INDICES = "indices.json"


def plan_glue(
    data: Path,
    out: Path,
    *,
    glue_task: str = "",
    vocabulary: str | Path | None = None,
    held_out: float = 0.0,
    stops: str = "auto",
    **settings: Any,
) -> Plan[Prepared]:
    """Plan the preparation of a GLUE task.

    Args:
        data: the folder of the whole benchmark, or of this task.
        out: the folder to make.
        glue_task: name of the task, "cola" or "CoLA".
        vocabulary: a WordPiece vocabulary, or the folder of a model that has one.
        held_out: share of the training set that becomes "dev"; 0: "dev" is the same as "test".
        stops: full stops to remove from the texts: "final", "all", none ("keep"), or, of MNLI, those that the training
            texts lack ("auto").
        settings: fields of `Settings`; `longest` counts pieces.

    Raises:
        DataError: an option is invalid, or a file is missing.
    """
    shared = _check(Settings(**settings))
    task = task_named(glue_task)
    if vocabulary is None:
        raise DataError("dataset 'glue' needs the WordPiece vocabulary of the model: give --vocabulary vocab.txt")
    if not 0 <= held_out < 1:
        raise DataError(f"held_out={held_out:g}: expected the share of train that dev takes, 0 or more and below 1")
    if stops not in STOPS:
        raise DataError(f"stops={stops!r}: choose one of {', '.join(STOPS)}")
    words = _vocabulary_file(vocabulary)
    files = find_glue(data, task)
    sums = checksums(list(files.values()), data) | {FILE: checksums([words], words.parent)[words.name]}
    options = {"held_out": held_out, "stops": stops, "glue_task": task.name}
    write = partial(_write, shared, task, files, words, held_out, stops)
    return Plan("glue", out, shared.stored(options), sums, write, Prepared.load, summarize)


def _check(settings: Settings) -> Settings:
    """Raise an error for settings that GLUE tasks do not support, and fill in the defaults."""
    if settings.vectors is not None:
        raise DataError("dataset 'glue' is for pre-trained models; leave out --vectors")
    if settings.tokenizer not in (None, "wordpiece"):
        raise DataError(f"tokenizer {settings.tokenizer!r}: dataset 'glue' takes wordpiece")
    if settings.longest is not None and settings.longest < 8:
        raise DataError(f"longest={settings.longest}: expected at least 8 pieces")
    return replace(settings, tokenizer="wordpiece", longest=settings.longest or LONGEST)


def _vocabulary_file(given: str | Path) -> Path:
    path = Path(given)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected a WordPiece vocabulary, one piece per line")
    return path


def _write(
    settings: Settings,
    task: GlueTask,
    files: dict[str, Path],
    vocabulary: Path,
    held_out: float,
    stops: str,
    plan: Plan[Prepared],
    jobs: int | None,
    progress: Progress,
) -> Prepared:
    progress("reading", 0, 0)
    rows = _read(files, task, held_out, settings)
    if stops == "auto":
        is_mnli = task.name == "mnli"
        stops = stops_to_drop(_texts(rows["train"]), _texts(rows["test"])) if is_mnli else "keep"
    pieces = WordPieces.read(vocabulary, settings.lowercase)
    parts, cut = {}, {}
    for name, part in rows.items():
        progress(f"pieces of {name}", 0, 0)
        parts[name], cut[name] = _encode(part, pieces, stops, settings.longest or LONGEST)
    indices = {name: list(part.indices) for name, part in rows.items() if part.indices}
    ids = {name: torch.cat([side.values for side in part.sentences]) for name, part in parts.items()}
    manifest = plan.manifest() | {
        "versions": {"tokenizers": version("tokenizers")},
        "rows": {name: len(part) for name, part in parts.items()},
        "skipped": {name: part.skipped for name, part in rows.items()},
        "unlabelled": {name: len(part) if name.startswith(PREDICT) else 0 for name, part in rows.items()},
        "cut": cut,
        "unknown": {name: float((part == pieces.index[UNKNOWN]).double().mean()) for name, part in ids.items()},
        "coverage": None,
        "stops": stops,
    }
    extra = {FILE: pieces.as_bytes(), INDICES: json.dumps(indices).encode()}
    vocabulary_words = pieces.as_vocabulary()
    return Prepared(plan.out, plan.dataset, task.classes, vocabulary_words, None, parts, manifest, extra).save()


def _read(files: dict[str, Path], task: GlueTask, held_out: float, settings: Settings) -> dict[str, GlueRows]:
    """Read every data split; "dev" is taken from "train", or is the same as "test"."""
    rows = {
        part: read_glue(path, task, labelled=not part.startswith(PREDICT), limit=settings.limit)
        for part, path in files.items()
    }
    rows["dev"] = rows["test"]
    if held_out:
        rows["train"], rows["dev"] = _split(rows["train"], held_out, settings.seed)
    order = sorted(rows, key=["train", "dev", "test", *rows].index)
    return {part: rows[part] for part in order}


def _split(train: GlueRows, share: float, seed: int) -> tuple[GlueRows, GlueRows]:
    """Hold out a random share of the rows; both sets keep the order of the rows."""
    count = len(train)
    held = round(count * share)
    if not 0 < held < count:
        raise DataError(f"held_out={share:g} of {count} rows leaves train or dev empty; choose another share")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    kept, held_out = (
        GlueRows(tuple([side[i] for i in rows] for side in train.texts), [train.labels[i] for i in rows], [])
        for rows in (sorted(order[held:]), sorted(order[:held]))
    )
    return replace(kept, skipped=train.skipped), held_out


def _texts(part: GlueRows) -> list[str]:
    return [text for side in part.texts for text in side]


def _encode(part: GlueRows, pieces: WordPieces, stops: str, longest: int) -> tuple[Part, int]:
    """Return the ids of each text, without [CLS] and [SEP] but with room for them, and the number of rows cut."""
    sides = [pieces.encode([without_stops(text, stops) for text in side]) for side in part.texts]
    room, cut = longest - 1 - len(sides), 0
    for row in range(len(part)):
        kept: tuple[list[int], ...]
        if len(sides) == 2:
            kept = cut_pair(sides[0][row], sides[1][row], room)
        else:
            kept = (sides[0][row][:room],)
        cut += sum(map(len, kept)) < sum(len(side[row]) for side in sides)
        for side, ids in zip(sides, kept, strict=True):
            side[row] = ids
    dtype = torch.float32 if any(isinstance(label, float) for label in part.labels) else torch.int64
    return Part(tuple(map(Ragged.from_rows, sides)), torch.tensor(part.labels, dtype=dtype)), cut


def summarize(prepared: Prepared) -> str:
    """Describe the prepared data splits, and which full stops were removed."""
    text, stops = summarize_parts(prepared), prepared.manifest.get("stops", "keep")
    if stops != "keep":
        text += f"\nwithout their {'final ' if stops == 'final' else ''}full stops, as those of train"
    return text
