"""Prepare all data of the pre-training study in one folder, shortened if wanted, and pack it into one small archive.

    repulsive prepare pretrain --data DIR --vocabulary vocab.txt --out prepared/pretrain
    python -m studies.pretraining.data --blocks prepared/pretrain --glue DIR --out small --pieces 20e6
    python -m studies.pretraining.data --blocks prepared/pretrain --glue DIR --out small --archive small.tar.xz
    python -m tarfile -e small.tar.xz prepared

The folder has `pretrain`, with the first blocks of training and all other parts, and `glue/TASK` for the eight tasks,
with the vocabulary of the blocks. Token ids are hard to compress: gzip leaves two thirds of their size; the archive,
whose compression is set up for two-byte numbers, 53 %.
"""

from __future__ import annotations

import argparse
import json
import lzma
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from repulsive.errors import ConfigError, RepulsiveError
from repulsive.lab.systems.datasets import prepare
from repulsive.lab.systems.electra.blocks import VOCABULARY, Blocks, Writer
from repulsive.lab.systems.glue.data import TASKS
from repulsive.lab.text.folders import digest

# Token ids have two bytes, so LZMA uses the last bit of a byte's position as context.
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 3, "lp": 1, "pb": 1}]


def shorten(source: Path, out: Path, pieces: int | None = None) -> Blocks:
    """Copy prepared blocks, with a limited number of training tokens.

    Args:
        source: a folder made by `repulsive prepare pretrain`.
        out: the folder to make.
        pieces: number of training tokens, rounded up to whole blocks; None for all.
    """
    blocks = Blocks.load(source)
    if out.exists():
        raise ConfigError(f"{out}: already exists; choose another --out")
    train = blocks.parts["train"]
    count = len(train) if pieces is None else min(len(train), -(-pieces // blocks.length))
    shutil.copytree(source, out)
    writer = Writer(out / "train.npy", blocks.length)
    writer.add(train[:count].numpy().view(np.uint16))
    writer.close()
    facts = dict(blocks.manifest)
    facts["rows"] = facts["rows"] | {"train": count}
    facts["files"] = facts["files"] | {"train.npy": digest(out / "train.npy")}
    facts["shortened"] = {"train": {"from": len(train), "to": count}}
    (out / "manifest.json").write_text(json.dumps(facts, indent=1))
    return Blocks.load(out)


def pack(folders: Sequence[Path], archive: Path) -> int:
    """Pack folders into one archive, which Python's `tarfile` opens; return its size in bytes."""
    with lzma.open(archive, "wb", filters=_FILTERS) as file, tarfile.open(fileobj=file, mode="w") as packed:
        for folder in folders:
            packed.add(folder, folder.name)
    return archive.stat().st_size


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=Path, required=True, help="a folder made by `repulsive prepare pretrain`")
    parser.add_argument("--glue", type=Path, required=True, help="folder of the benchmark's files")
    parser.add_argument("--out", type=Path, required=True, help="folder to make; existing parts are kept")
    parser.add_argument("--pieces", type=float, help="training tokens; all by default")
    parser.add_argument("--archive", type=Path, help="also pack the folder into this .tar.xz; takes a minute")
    arguments = parser.parse_args(words)
    try:
        if not (arguments.out / "pretrain").exists():
            shorten(arguments.blocks, arguments.out / "pretrain", int(arguments.pieces) if arguments.pieces else None)
        for task in TASKS:
            if not (arguments.out / "glue" / task).exists():
                vocabulary = arguments.out / "pretrain" / VOCABULARY
                prepare("glue", arguments.glue, arguments.out / "glue" / task, glue_task=task, vocabulary=vocabulary)
        blocks = Blocks.load(arguments.out / "pretrain")
        train = blocks.parts["train"]
        print(f"{arguments.out}: {len(train):,} blocks of {blocks.length}, {train[:, :-2].numel():,} tokens")
        if arguments.archive:
            size = pack([arguments.out / "pretrain", arguments.out / "glue"], arguments.archive)
            print(f"{arguments.archive}: {size:,} bytes")
    except RepulsiveError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
