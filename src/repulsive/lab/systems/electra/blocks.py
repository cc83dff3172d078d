"""Memory-mapped blocks of word pieces for pre-training, as `repulsive prepare pretrain` writes them.

    blocks = Blocks.load("prepared/pretrain")
    tokens, first, ends = unpack(blocks.parts["train"][:8], blocks.length)

A data split is one `.npy` file, uint16 [N, length + 2]: the ids of a block, the end of its first segment, and its end.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from repulsive.errors import DataError
from repulsive.lab.systems.electra.packing import EXTRA
from repulsive.lab.text.folders import content_errors, open_manifest
from repulsive.lab.text.prepared import PARTS
from repulsive.lab.text.wordpiece import CLS, PADDING, SEP, UNKNOWN, WordPieces
from repulsive.lab.text.wordpiece import FILE as VOCABULARY

TASK = "pretrain"
MASK = "[MASK]"
_MARKS = {"PAD": PADDING, "UNK": UNKNOWN, "CLS": CLS, "SEP": SEP, "MASK": MASK}
_MOST = 1 << 16  # ids that fit into 16 bits


@dataclass(frozen=True, eq=False)
class Blocks:
    """A prepared pre-training corpus.

    Args:
        folder: folder of the prepared corpus.
        length: length of a block in word pieces.
        pieces: the vocabulary.
        parts: "train", "dev" and "test": int16 [N, length + 2] that hold unsigned numbers; see `unpack`.
        manifest: settings and checksums with which the corpus was prepared.
    """

    folder: Path
    length: int
    pieces: WordPieces
    parts: dict[str, Tensor]
    manifest: dict[str, Any]

    @classmethod
    def load(cls, folder: str | Path) -> Blocks:
        """Map a folder that `repulsive prepare pretrain` made into memory.

        Raises:
            DataError: there is no such folder, it is another dataset, or a file in it is missing or damaged.
        """
        folder = Path(folder)
        manifest = open_manifest(folder, TASK)
        with content_errors(folder):
            length = int(manifest["settings"]["length"])
            pieces = WordPieces.read(folder / VOCABULARY, bool(manifest["settings"]["lowercase"]))
            parts = {part: _mapped(folder / f"{part}.npy", length) for part in PARTS}
        return cls(folder, length, pieces, parts, manifest)

    @property
    def padded(self) -> bool:
        """Whether the corpus has padded blocks."""
        return any(self.manifest["padding"].values())


def unpack(rows: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Unpack rows of a data split into token ids and segment ends.

    Args:
        rows: int16 [B, length + 2].
        length: length of a block in word pieces.

    Returns:
        Token ids, int64 [B, length]; the ends of the first segments, and of the blocks, int64 [B] each.
    """
    values = rows.long() & 0xFFFF
    return values[:, :length], values[:, length], values[:, length + 1]


def marks_of(pieces: WordPieces) -> dict[str, int]:
    """Return the ids of "PAD", "UNK", "CLS", "SEP" and "MASK".

    Raises:
        DataError: the vocabulary has no mask token, or more pieces than 16-bit ids can number.
    """
    if MASK not in pieces.index:
        raise DataError(f"the vocabulary lacks {MASK}, which pre-training needs")
    if len(pieces.pieces) > _MOST:
        raise DataError(f"the vocabulary has {len(pieces.pieces):,} pieces, expected at most {_MOST:,}")
    return {name: pieces.index[mark] for name, mark in _MARKS.items()}


def _mapped(path: Path, length: int) -> Tensor:
    # "c" (copy on write): torch requires writable memory, although nothing is written.
    rows = np.load(path, mmap_mode="c", allow_pickle=False)
    if rows.dtype != np.uint16 or rows.ndim != 2 or rows.shape[1] != length + EXTRA:
        actual = f"{rows.dtype} {list(rows.shape)}"
        raise DataError(f"{path}: expected uint16 [N, {length + EXTRA}], got {actual}; prepare it again with --force")
    return torch.from_numpy(rows.view(np.int16))


class Writer:
    """Write rows to a `.npy` file whose number of rows is not known in advance.

    Args:
        path: the file to write.
        length: length of a block in word pieces.
    """

    def __init__(self, path: Path, length: int) -> None:
        self.rows = 0
        self._columns = length + EXTRA
        self._file = open(path, "wb")  # noqa: SIM115  closed by `close`
        self._header()

    def add(self, rows: np.ndarray) -> None:
        """Write more rows, uint16 [N, length + 2]."""
        self._file.write(np.ascontiguousarray(rows, dtype="<u2").tobytes())
        self.rows += len(rows)

    def close(self) -> None:
        """Write the number of rows into the header."""
        self._file.seek(0)
        self._header()
        self._file.close()

    def _header(self) -> None:
        """Write the header, which has the same length for any number of rows."""
        text = json.dumps({"descr": "<u2", "fortran_order": False, "shape": [self.rows, self._columns]})
        text = text.replace("false", "False").replace("[", "(").replace("]", ")").replace('"', "'")
        self._file.write(b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + text.ljust(117).encode() + b"\n")
