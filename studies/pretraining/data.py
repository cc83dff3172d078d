"""All data of the study of pre-training in one folder, as short as wanted, and in one small file to move elsewhere.

    repulsive prepare pretrain --data DIR --vocabulary vocab.txt --out prepared/pretrain
    python -m studies.pretraining.data --blocks prepared/pretrain --glue DIR --out small --pieces 20e6
    python -m studies.pretraining.data --blocks prepared/pretrain --glue DIR --out small --archive small.tar.xz
    python -m tarfile -e small.tar.xz prepared

The folder has `pretrain`, the first blocks of training and all of the other parts, and `glue/TASK` for the eight tasks,
with the blocks' own vocabulary. Numbers of pieces are hard to compress: gzip leaves two thirds of them, the archive,
which knows that every second byte is alike, 53 %.
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

# Numbers have two bytes, so literals and places are told apart by the last bit of where they stand.
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 3, "lp": 1, "pb": 1}]


def shorten(source: Path, out: Path, pieces: int | None = None) -> Blocks:
    """A copy of prepared blocks with the first so many pieces of training.

    Args:
        source: what `repulsive prepare pretrain` made.
        out: the folder to make.
        pieces: of training, rounded up to whole blocks; None: all.
    """
    blocks = Blocks.load(source)
    if out.exists():
        raise ConfigError(f"{out}: is there already; choose another --out")
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
    """Folders in one file, which Python's `tarfile` opens; its size."""
    with lzma.open(archive, "wb", filters=_FILTERS) as file, tarfile.open(fileobj=file, mode="w") as packed:
        for folder in folders:
            packed.add(folder, folder.name)
    return archive.stat().st_size


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=Path, required=True, help="a folder that `repulsive prepare pretrain` made")
    parser.add_argument("--glue", type=Path, required=True, help="the benchmark's files")
    parser.add_argument("--out", type=Path, required=True, help="what is there stays")
    parser.add_argument("--pieces", type=float, help="of training; all by default")
    parser.add_argument("--archive", type=Path, help="a .tar.xz to write the folder to; it takes a minute")
    given = parser.parse_args(words)
    try:
        if not (given.out / "pretrain").exists():
            shorten(given.blocks, given.out / "pretrain", int(given.pieces) if given.pieces else None)
        for task in TASKS:
            if not (given.out / "glue" / task).exists():
                vocabulary = given.out / "pretrain" / VOCABULARY
                prepare("glue", given.glue, given.out / "glue" / task, glue_task=task, vocabulary=vocabulary)
        blocks = Blocks.load(given.out / "pretrain")
        train = blocks.parts["train"]
        print(f"{given.out}: {len(train):,} blocks of {blocks.length}, {train[:, :-2].numel():,} pieces")
        if given.archive:
            size = pack([given.out / "pretrain", given.out / "glue"], given.archive)
            print(f"{given.archive}: {size:,} bytes")
    except RepulsiveError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
