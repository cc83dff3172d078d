"""Memory-mapped token ids of a running text, as `repulsive prepare lm` writes them.

    text = Text.load("prepared/lm")
    tokens = numbers(text.parts["train"][:512])  # int64 [512]

A data split is one `.npy` file, uint8 or uint16 [N]. The manifest has its number of text bytes, so that losses of
different tokenizers can be compared in nats per byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from repulsive.errors import DataError
from repulsive.lab.text.folders import content_errors, open_manifest
from repulsive.lab.text.prepared import PARTS
from repulsive.lab.text.wordpiece import FILE as VOCABULARY
from repulsive.lab.text.wordpiece import WordPieces

TASK = "lm"
TOKENIZERS = ("bytes", "wordpiece")
BYTES = 256


@dataclass(frozen=True, eq=False)
class Text:
    """A prepared text for language models.

    Args:
        folder: folder of the prepared text.
        vocabulary: size of the vocabulary.
        parts: "train", "dev" and "test": uint8 [N], or int16 [N] that hold unsigned numbers; see `numbers`.
        bytes: length of each data split's text in bytes.
        manifest: settings and checksums with which the text was prepared.
        pieces: the WordPiece vocabulary; None if tokens are bytes.
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
            DataError: there is no such folder, it is another dataset, or a file in it is missing or damaged.
        """
        folder = Path(folder)
        manifest = open_manifest(folder, TASK)
        with content_errors(folder):
            settings, pieces = manifest["settings"], None
            if settings["tokenizer"] != "bytes":
                pieces = WordPieces.read(folder / VOCABULARY, bool(settings["lowercase"]))
            vocabulary = BYTES if pieces is None else len(pieces.pieces)
            parts = {part: _mapped(folder / f"{part}.npy", vocabulary) for part in PARTS}
            counts = {part: int(manifest["bytes"][part]) for part in PARTS}
            if min(counts.values()) < 1:
                problem = f"has a part of {min(counts.values())} bytes"
                raise DataError(f"{folder}: {problem}; prepare it again with --force")
        return cls(folder, vocabulary, parts, counts, manifest, pieces)

    def tokens_per_byte(self, part: str) -> float:
        """Compute the tokens per byte of a data split, a factor that converts nats per token into nats per byte."""
        return len(self.parts[part]) / self.bytes[part]


def numbers(tokens: Tensor) -> Tensor:
    """Convert the stored tokens of a data split to int64."""
    return tokens.long() & 0xFFFF  # int16 holds unsigned numbers


def storage_type(vocabulary: int) -> type[np.uint8] | type[np.uint16]:
    """Return the integer type in which the ids of a vocabulary of this size are stored."""
    return np.uint8 if vocabulary <= BYTES else np.uint16


def _mapped(path: Path, vocabulary: int) -> Tensor:
    # "c" (copy on write): torch requires writable memory, although nothing is written.
    ids = np.load(path, mmap_mode="c", allow_pickle=False)
    kind = storage_type(vocabulary)
    if ids.dtype != kind or ids.ndim != 1:
        problem = f"expected {kind.__name__} [N], got {ids.dtype} {list(ids.shape)}"
        raise DataError(f"{path}: {problem}; prepare it again with --force")
    if len(ids) < 2 or int(ids.max()) >= vocabulary:
        raise DataError(f"{path}: expected at least 2 tokens, all below {vocabulary:,}; prepare it again with --force")
    return torch.from_numpy(ids if kind is np.uint8 else ids.view(np.int16))
