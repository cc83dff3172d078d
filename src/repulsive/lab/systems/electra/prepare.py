"""A corpus to blocks of word pieces, in several processes, however large it is.

    plan_pretrain("data/pretrain", "vocab.txt", "prepared/pretrain").make()

Documents are dealt out to the parts at random. Chunks of them are cut into pieces and packed, each with random numbers
of its own, so that the same files make the same blocks, whatever the number of processes.
"""

from __future__ import annotations

import os
import random
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from repulsive.errors import DataError
from repulsive.lab.systems.electra.blocks import TASK, VOCABULARY, Blocks, Writer, marks_of
from repulsive.lab.systems.electra.packing import PACKINGS, as_rows
from repulsive.lab.text.documents import Document, find_corpus, read_documents
from repulsive.lab.text.folders import filling
from repulsive.lab.text.plan import is_made
from repulsive.lab.text.prepared import PARTS
from repulsive.lab.text.raw import sums_of
from repulsive.lab.text.tokenizing import Progress, interrupts_held
from repulsive.lab.text.wordpiece import WordPieces
from repulsive.safety.parents import watch_parent

LENGTH = 128
DEV = 0.005
_CHUNK = 1_000_000  # characters packed together
_FEW = 5_000_000  # bytes that are done before other processes would have started
_packer: Packer  # of a worker process


@dataclass(frozen=True)
class Packer:
    """How a chunk of documents becomes rows.

    Args:
        pieces: the vocabulary.
        length: of a block.
        packing: see `packing`.
        seed: of what is drawn.
    """

    pieces: WordPieces
    length: int
    packing: str
    seed: int

    def __call__(self, part: str, number: int, documents: list[Document]) -> tuple[np.ndarray, Counter[str]]:
        """Rows of a chunk, and what was counted on the way."""
        marks = marks_of(self.pieces)
        encoded = iter(self.pieces.encode([text for document in documents for text in document]))
        found = [[next(encoded) for _ in document] for document in documents]
        draw = random.Random(f"{self.seed} {part} {number}")
        rows = as_rows(PACKINGS[self.packing](found, self.length, draw), self.length, marks)
        pieces = [piece for document in found for paragraph in document for piece in paragraph]
        counts = Counter(
            documents=len(documents),
            pieces=len(pieces),
            unknown=pieces.count(marks["UNK"]),
            kept=int(rows[:, -1].sum(dtype=np.int64) - len(rows) * 2 - (rows[:, -1] > rows[:, -2]).sum()),
            padding=int((self.length - rows[:, -1].astype(np.int64)).sum()),
        )
        return rows, counts


@dataclass(frozen=True)
class PretrainPlan:
    """A preparation that can begin: files are found and summed, none is read.

    Args:
        out: the folder to make.
        files: of the corpus.
        packer: how blocks are made.
        asked: settings as the manifest has them.
        sums: SHA-256 of all files.
    """

    out: Path
    files: list[Path]
    packer: Packer
    asked: dict[str, Any]
    sums: dict[str, str]

    def already(self) -> Blocks | None:
        """What is in the folder, if it was made from the same files in the same way; None if there is nothing.

        Raises:
            DataError: it was made otherwise, is damaged, or is something else.
        """
        return Blocks.load(self.out) if is_made(self.out, TASK, self.asked, self.sums) else None

    def make(self, jobs: int | None = None, progress: Progress | None = None) -> Blocks:
        """Read, pack and write; what is prepared in the folder is replaced.

        Args:
            jobs: processes; None: as many as there are processors. With more than one, guard the calling script with
                `if __name__ == "__main__":`.
            progress: told how many documents are done.

        Raises:
            DataError: a file is damaged, a part is empty, or the folder cannot be written.
        """
        counts: dict[str, Counter[str]] = {part: Counter() for part in PARTS}
        manifest: dict[str, Any] = {"task": TASK, "settings": self.asked, "sources": self.sums}
        manifest["versions"] = {"tokenizers": version("tokenizers")}
        done = 0
        with filling(self.out, manifest) as aside:
            (aside / VOCABULARY).write_bytes(self.packer.pieces.as_bytes())
            with ExitStack() as stack:
                length = self.packer.length
                files = {part: stack.enter_context(closing(Writer(aside / f"{part}.npy", length))) for part in PARTS}
                for part, (rows, counted) in self._packed(jobs or os.cpu_count() or 1):
                    files[part].add(rows)
                    counts[part] += counted
                    done += counted["documents"]
                    if progress is not None:
                        progress("documents", done, 0)
            manifest["rows"] = {part: file.rows for part, file in files.items()}
            for part, file in files.items():
                if not file.rows:
                    which = f"too few texts for a {part} part; raise --dev"
                    if part == "train":
                        short = f"not one block of {length} pieces; give more text or a smaller --length"
                        which = short if counts[part]["documents"] else "no texts"
                    raise DataError(f"{', '.join(str(path) for path in self.files[:3])}: {which}")
            for name in ("documents", "pieces", "kept", "padding"):
                manifest[name] = {part: counts[part][name] for part in PARTS}
            manifest["unknown"] = {part: counts[part]["unknown"] / max(1, counts[part]["pieces"]) for part in PARTS}
        return Blocks.load(self.out)

    def _chunks(self) -> Iterator[tuple[str, int, list[Document]]]:
        """Documents of a part that are packed together, with a number."""
        draw, dev = random.Random(self.packer.seed), float(self.asked["dev"])
        waiting: dict[str, list[Document]] = {part: [] for part in PARTS}
        sizes, numbers = Counter[str](), Counter[str]()
        for path in self.files:
            for document in read_documents(path, self.asked["limit"]):
                at = draw.random()
                part = "dev" if at < dev else "test" if at < 2 * dev else "train"
                waiting[part].append(document)
                sizes[part] += sum(map(len, document))
                if sizes[part] >= _CHUNK:
                    yield part, numbers[part], waiting[part]
                    numbers[part] += 1
                    waiting[part], sizes[part] = [], 0
        yield from ((part, numbers[part], documents) for part, documents in waiting.items() if documents)

    def _packed(self, jobs: int) -> Iterator[tuple[str, tuple[np.ndarray, Counter[str]]]]:
        if jobs < 2 or sum(path.stat().st_size for path in self.files) < _FEW:
            yield from ((part, self.packer(part, number, some)) for part, number, some in self._chunks())
            return
        pool = ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_start, initargs=(os.getpid(), self.packer))
        running: deque[tuple[str, Future[tuple[np.ndarray, Counter[str]]]]] = deque()
        try:
            for part, number, some in self._chunks():
                with interrupts_held():
                    running.append((part, pool.submit(_in_worker, part, number, some)))
                if len(running) > 3 * jobs:  # a corpus need not fit into memory
                    first, future = running.popleft()
                    yield first, future.result()
            while running:
                first, future = running.popleft()
                yield first, future.result()
        except BrokenProcessPool:
            raise DataError(
                "a process that packs texts ended early: out of memory, or a script without "
                '`if __name__ == "__main__":`; jobs=1 needs no processes'
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def plan_pretrain(
    data: str | Path,
    vocabulary: str | Path,
    out: str | Path,
    *,
    length: int = LENGTH,
    packing: str = "full",
    dev: float = DEV,
    lowercase: bool = True,
    seed: int = 0,
    limit: int = 20,
) -> PretrainPlan:
    """Find the files of a corpus and check what is asked for.

    Args:
        data: a text file or an archive, or a folder of them; see `documents`.
        vocabulary: BERT's `vocab.txt`.
        out: the folder to make.
        length: of a block, marks included.
        packing: "full" or "official"; see `packing`.
        dev: share of the documents that dev gets, and test as many again.
        lowercase: as BERT uncased.
        seed: of what is drawn.
        limit: bad lines that may be skipped in a file.

    Raises:
        DataError: a value that cannot be, or a file that is missing or no vocabulary.
    """
    if packing not in PACKINGS:
        raise DataError(f"packing={packing!r}: choose one of {', '.join(PACKINGS)}")
    if not 8 <= length <= 512:
        raise DataError(f"length={length}: a block has from 8 to 512 pieces")
    if not 0 < dev < 0.5:
        raise DataError(f"dev={dev:g}: it is the share of the documents that dev takes, and test; between 0 and 0.5")
    data, vocabulary = Path(data), Path(vocabulary)
    pieces = WordPieces.read(vocabulary, lowercase)
    try:
        marks_of(pieces)
    except DataError as error:
        raise DataError(f"{vocabulary}: {error}") from None
    files = find_corpus(data, apart_from=vocabulary)
    asked = {
        "length": length,
        "packing": packing,
        "dev": dev,
        "lowercase": lowercase,
        "seed": seed,
        "limit": limit,
    }
    sums = sums_of(files, data if data.is_dir() else data.parent) | sums_of([vocabulary], vocabulary.parent)
    return PretrainPlan(Path(out), files, Packer(pieces, length, packing, seed), asked, sums)


def summary(blocks: Blocks) -> str:
    """What was made, in a few lines."""
    told, lines = blocks.manifest, []
    for part in PARTS:
        rows, kept = told["rows"][part], told["kept"][part]
        lost, padding = 1 - kept / max(1, told["pieces"][part]), told["padding"][part] / (rows * blocks.length)
        lines.append(
            f"{part:5}  {told['documents'][part]:>11,} documents  {rows:>11,} blocks  {kept:>14,} pieces"
            f"  ({lost:.1%} cut off, {padding:.1%} padding, {told['unknown'][part]:.2%} unknown)"
        )
    return "\n".join([*lines, f"blocks of {blocks.length}, vocabulary of {len(blocks.pieces.pieces):,} pieces"])


def _start(parent: int, packer: Packer) -> None:
    global _packer
    import signal

    watch_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # of this process alone: there is one for every processor
    _packer = packer


def _in_worker(part: str, number: int, documents: list[Document]) -> tuple[np.ndarray, Counter[str]]:
    return _packer(part, number, documents)
