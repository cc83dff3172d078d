"""Blocks of word pieces for pre-training, memory-mapped: what `repulsive prepare pretrain` makes.

    blocks = Blocks.load("prepared/pretrain")
    tokens, first, ends = unpack(blocks.parts["train"][:8], blocks.length)

A part is one `.npy` file, uint16 [N, length + 2]: the pieces of a block, where its first segment ends, where it ends.
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
from repulsive.lab.text.folders import check_digests, read_manifest, understood
from repulsive.lab.text.prepared import PARTS
from repulsive.lab.text.wordpiece import CLS, PADDING, SEP, UNKNOWN, WordPieces
from repulsive.lab.text.wordpiece import FILE as VOCABULARY

TASK = "pretrain"
MASK = "[MASK]"
_MARKS = {"PAD": PADDING, "UNK": UNKNOWN, "CLS": CLS, "SEP": SEP, "MASK": MASK}
_MOST = 1 << 16  # pieces that 16 bits can number


@dataclass(frozen=True, eq=False)
class Blocks:
    """A corpus, ready to train on.

    Args:
        folder: where it is.
        length: pieces of a block.
        pieces: the vocabulary.
        parts: "train", "dev" and "test": int16 [N, length + 2], to be read without a sign.
        manifest: how it was made.
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
            DataError: there is none, it is of another task, or a file in it is missing or damaged.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        if manifest.get("task") != TASK:
            raise DataError(f"{folder}: is task {manifest.get('task')!r}, not {TASK}; prepare it as that")
        check_digests(folder, manifest)
        with understood(folder):
            length = int(manifest["settings"]["length"])
            pieces = WordPieces.read(folder / VOCABULARY, bool(manifest["settings"]["lowercase"]))
            parts = {part: _mapped(folder / f"{part}.npy", length) for part in PARTS}
        return cls(folder, length, pieces, parts, manifest)

    @property
    def padded(self) -> bool:
        """Whether any block is shorter than others."""
        return any(self.manifest["padding"].values())


def unpack(rows: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """What is in rows of a part.

    Args:
        rows: int16 [B, length + 2].
        length: of a block.

    Returns:
        Pieces, int64 [B, length]; where first segments end and where blocks do, int64 [B] each.
    """
    values = rows.long() & 0xFFFF
    return values[:, :length], values[:, length], values[:, length + 1]


def marks_of(pieces: WordPieces) -> dict[str, int]:
    """Numbers of "PAD", "UNK", "CLS", "SEP" and "MASK".

    Raises:
        DataError: the vocabulary cannot be masked, or has more pieces than 16 bits can number.
    """
    if MASK not in pieces.index:
        raise DataError(f"a vocabulary for pre-training has {MASK}; this one does not")
    if len(pieces.pieces) > _MOST:
        raise DataError(f"a vocabulary for pre-training has at most {_MOST:,} pieces, not {len(pieces.pieces):,}")
    return {name: pieces.index[mark] for name, mark in _MARKS.items()}


def _mapped(path: Path, length: int) -> Tensor:
    # "c": torch wants to be allowed to write; nobody does, and it would not reach the file.
    found = np.load(path, mmap_mode="c", allow_pickle=False)
    if found.dtype != np.uint16 or found.ndim != 2 or found.shape[1] != length + EXTRA:
        raise DataError(f"{path}: holds {found.dtype} {list(found.shape)}, no blocks of {length}; prepare it again")
    return torch.from_numpy(found.view(np.int16))


class Writer:
    """Rows to a `.npy` file, without knowing how many there will be.

    Args:
        path: the file to make.
        length: of a block.
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
        """Say at the beginning of the file how many rows it has."""
        self._file.seek(0)
        self._header()
        self._file.close()

    def _header(self) -> None:
        """Of the same length for any number of rows."""
        text = json.dumps({"descr": "<u2", "fortran_order": False, "shape": [self.rows, self._columns]})
        text = text.replace("false", "False").replace("[", "(").replace("]", ")").replace('"', "'")
        self._file.write(b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + text.ljust(117).encode() + b"\n")
