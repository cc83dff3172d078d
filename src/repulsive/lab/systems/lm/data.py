"""Running text as packed tokens, memory-mapped: what `repulsive prepare lm` makes.

    text = Text.load("prepared/lm")
    tokens = numbers(text.parts["train"][:512])  # int64 [512]

A part is one `.npy` file, uint8 or uint16 [N]. The manifest says how many bytes of text each part stands for, so that
losses of different tokenisations compare in nats per byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from repulsive.errors import DataError
from repulsive.lab.text.folders import check_digests, read_manifest, understood
from repulsive.lab.text.prepared import PARTS
from repulsive.lab.text.wordpiece import FILE as VOCABULARY
from repulsive.lab.text.wordpiece import WordPieces

TASK = "lm"
TOKENIZERS = ("bytes", "wordpiece")
BYTES = 256


@dataclass(frozen=True, eq=False)
class Text:
    """A text, ready to train on.

    Args:
        folder: where it is.
        vocabulary: number of different tokens.
        parts: "train", "dev" and "test": uint8 [N], or int16 [N] to be read without a sign; see `numbers`.
        bytes: of text that each part stands for.
        manifest: how it was made.
        pieces: the WordPiece vocabulary; None where tokens are bytes.
    """

    folder: Path
    vocabulary: int
    parts: dict[str, Tensor]
    bytes: dict[str, int]
    manifest: dict[str, Any]
    pieces: WordPieces | None = None

    @classmethod
    def load(cls, folder: str | Path) -> Text:
        """Map a folder that `repulsive prepare lm` made into memory.

        Raises:
            DataError: there is none, it is of another task, or a file in it is missing or damaged.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        if manifest.get("task") != TASK:
            raise DataError(f"{folder}: was prepared for {manifest.get('task')!r}, not {TASK!r}; prepare it as {TASK}")
        check_digests(folder, manifest)
        with understood(folder):
            settings, pieces = manifest["settings"], None
            if settings["tokenizer"] != "bytes":
                pieces = WordPieces.read(folder / VOCABULARY, bool(settings["lowercase"]))
            vocabulary = BYTES if pieces is None else len(pieces.pieces)
            parts = {part: _mapped(folder / f"{part}.npy", vocabulary) for part in PARTS}
            counts = {part: int(manifest["bytes"][part]) for part in PARTS}
            if min(counts.values()) < 1:
                raise DataError(f"{folder}: has a part of {min(counts.values())} bytes; prepare it again with --force")
        return cls(folder, vocabulary, parts, counts, manifest, pieces)

    def tokens_per_byte(self, part: str) -> float:
        """Tokens of a part over the bytes they stand for: turns nats per token into nats per byte."""
        return len(self.parts[part]) / self.bytes[part]


def numbers(tokens: Tensor) -> Tensor:
    """Tokens of a part as int64."""
    return tokens.long() & 0xFFFF  # int16 holds unsigned numbers


def kind_of(vocabulary: int) -> type[np.uint8] | type[np.uint16]:
    """The type that stores the tokens of a vocabulary."""
    return np.uint8 if vocabulary <= BYTES else np.uint16


def _mapped(path: Path, vocabulary: int) -> Tensor:
    # "c": torch requires writable memory; nothing is written, and it would not reach the file.
    found = np.load(path, mmap_mode="c", allow_pickle=False)
    kind = kind_of(vocabulary)
    if found.dtype != kind or found.ndim != 1:
        told = f"expected {kind.__name__} [N], got {found.dtype} {list(found.shape)}"
        raise DataError(f"{path}: {told}; prepare it again with --force")
    if len(found) < 2 or int(found.max()) >= vocabulary:
        raise DataError(f"{path}: expected at least 2 tokens, all below {vocabulary:,}; prepare it again with --force")
    return torch.from_numpy(found if kind is np.uint8 else found.view(np.int16))
