"""Prepare a pre-training corpus of any size: documents to blocks of word pieces, in several processes.

    prepare("pretrain", "data/pretrain", "prepared/pretrain", vocabulary="vocab.txt")

Documents are assigned to the data splits at random. Chunks of documents are tokenised and packed, each with its own
random generator, so that the blocks do not depend on the number of processes.
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
from repulsive.lab.systems.electra.datasets import DEV, LENGTH
from repulsive.lab.systems.electra.packing import PACKINGS, as_rows
from repulsive.lab.text.dataset import Plan
from repulsive.lab.text.documents import Document, find_corpus, read_documents
from repulsive.lab.text.folders import filling
from repulsive.lab.text.inputs import checksums
from repulsive.lab.text.prepared import PARTS
from repulsive.lab.text.progress import Progress
from repulsive.lab.text.tokenizing import hold_interrupts
from repulsive.lab.text.wordpiece import WordPieces
from repulsive.safety.parents import watch_parent

_CHUNK = 1_000_000  # characters packed together
_FEW = 5_000_000  # bytes; smaller corpora are finished before other processes would have started
_packer: Packer  # of a worker process


@dataclass(frozen=True)
class Packer:
    """Tokenise and pack a chunk of documents.

    Args:
        pieces: the vocabulary.
        length: length of a block in word pieces.
        packing: a key of `PACKINGS`.
        seed: random seed.
    """

    pieces: WordPieces
    length: int
    packing: str
    seed: int

    def __call__(self, part: str, number: int, documents: list[Document]) -> tuple[np.ndarray, Counter[str]]:
        """Return the rows of a chunk, and counts for the manifest."""
        marks = marks_of(self.pieces)
        encoded = iter(self.pieces.encode([text for document in documents for text in document]))
        ids = [[next(encoded) for _ in document] for document in documents]
        draw = random.Random(f"{self.seed} {part} {number}")
        rows = as_rows(PACKINGS[self.packing](ids, self.length, draw), self.length, marks)
        pieces = [piece for document in ids for paragraph in document for piece in paragraph]
        counts = Counter(
            documents=len(documents),
            pieces=len(pieces),
            unknown=pieces.count(marks["UNK"]),
            kept=int(rows[:, -1].sum(dtype=np.int64) - len(rows) * 2 - (rows[:, -1] > rows[:, -2]).sum()),
            padding=int((self.length - rows[:, -1].astype(np.int64)).sum()),
        )
        return rows, counts


@dataclass(frozen=True)
class _Corpus:
    """Documents of some files, dealt out to the data splits and packed into blocks.

    Args:
        files: files of the corpus.
        packer: function that makes the blocks.
        dev: share of the documents that go to dev; test gets as many.
        limit: number of bad lines that may be skipped in a file.
    """

    files: list[Path]
    packer: Packer
    dev: float
    limit: int

    def write(self, plan: Plan[Blocks], jobs: int | None, progress: Progress) -> Blocks:
        """Write the folder that a plan describes."""
        counts: dict[str, Counter[str]] = {part: Counter() for part in PARTS}
        manifest: dict[str, Any] = {"task": TASK} | plan.manifest()
        manifest["versions"] = {"tokenizers": version("tokenizers")}
        done = 0
        with filling(plan.out, manifest) as aside:
            (aside / VOCABULARY).write_bytes(self.packer.pieces.as_bytes())
            with ExitStack() as stack:
                length = self.packer.length
                files = {part: stack.enter_context(closing(Writer(aside / f"{part}.npy", length))) for part in PARTS}
                for part, (rows, counted) in self._packed(jobs or os.cpu_count() or 1):
                    files[part].add(rows)
                    counts[part] += counted
                    done += counted["documents"]
                    progress("documents", done, 0)
            manifest["rows"] = {part: file.rows for part, file in files.items()}
            for part, file in files.items():
                if not file.rows:
                    problem = f"too few texts for a {part} part; raise --dev"
                    if part == "train":
                        short = f"not one block of {length} pieces; give more text or a smaller --length"
                        problem = short if counts[part]["documents"] else "no texts"
                    raise DataError(f"{', '.join(str(path) for path in self.files[:3])}: {problem}")
            for name in ("documents", "pieces", "kept", "padding"):
                manifest[name] = {part: counts[part][name] for part in PARTS}
            manifest["unknown"] = {part: counts[part]["unknown"] / max(1, counts[part]["pieces"]) for part in PARTS}
        return Blocks.load(plan.out)

    def _chunks(self) -> Iterator[tuple[str, int, list[Document]]]:
        """Yield chunks of documents: the data split, the number of the chunk in the split, and the documents."""
        draw, dev = random.Random(self.packer.seed), self.dev
        waiting: dict[str, list[Document]] = {part: [] for part in PARTS}
        sizes, numbers = Counter[str](), Counter[str]()
        for path in self.files:
            for document in read_documents(path, self.limit):
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
                with hold_interrupts():
                    running.append((part, pool.submit(_in_worker, part, number, some)))
                if len(running) > 3 * jobs:  # limits how much of the corpus is in memory
                    first, future = running.popleft()
                    yield first, future.result()
            while running:
                first, future = running.popleft()
                yield first, future.result()
        except BrokenProcessPool:
            raise DataError(
                "a worker process ended early: out of memory, or a script without "
                '`if __name__ == "__main__":`; jobs=1 uses no worker processes'
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def plan_pretrain(
    data: str | Path,
    out: str | Path,
    *,
    vocabulary: str | Path | None = None,
    length: int = LENGTH,
    packing: str = "full",
    dev: float = DEV,
    lowercase: bool = True,
    seed: int = 0,
    limit: int = 20,
) -> Plan[Blocks]:
    """Plan the preparation of a corpus.

    Args:
        data: a text file or an archive, or a folder of them; see `documents`.
        out: the folder to make.
        vocabulary: BERT's `vocab.txt`.
        length: length of a block in word pieces, [CLS] and [SEP] included.
        packing: "full" or "official"; see `packing`.
        dev: share of the documents that go to dev; test gets as many.
        lowercase: lower-case the texts, as BERT uncased.
        seed: random seed.
        limit: number of bad lines that may be skipped in a file.

    Raises:
        DataError: an option is invalid, or a file is missing or not a vocabulary.
    """
    if vocabulary is None:
        raise DataError("dataset 'pretrain' needs a WordPiece vocabulary: give --vocabulary vocab.txt")
    if packing not in PACKINGS:
        raise DataError(f"packing={packing!r}: choose one of {', '.join(PACKINGS)}")
    if not 8 <= length <= 512:
        raise DataError(f"length={length}: expected a block length from 8 to 512 pieces")
    if not 0 < dev < 0.5:
        raise DataError(f"dev={dev:g}: expected the share of the documents for dev, and for test, between 0 and 0.5")
    data, vocabulary = Path(data), Path(vocabulary)
    pieces = WordPieces.read(vocabulary, lowercase)
    try:
        marks_of(pieces)
    except DataError as error:
        raise DataError(f"{vocabulary}: {error}") from None
    files = find_corpus(data, apart_from=vocabulary)
    settings = {
        "length": length,
        "packing": packing,
        "dev": dev,
        "lowercase": lowercase,
        "seed": seed,
        "limit": limit,
    }
    sums = checksums(files, data if data.is_dir() else data.parent) | checksums([vocabulary], vocabulary.parent)
    corpus = _Corpus(files, Packer(pieces, length, packing, seed), float(dev), limit)
    return Plan(TASK, Path(out), settings, sums, corpus.write, Blocks.load, summarize)


def summarize(blocks: Blocks) -> str:
    """Describe the prepared data, one line per data split."""
    manifest, lines = blocks.manifest, []
    for part in PARTS:
        rows, kept = manifest["rows"][part], manifest["kept"][part]
        lost = 1 - kept / max(1, manifest["pieces"][part])
        padding = manifest["padding"][part] / (rows * blocks.length)
        lines.append(
            f"{part:5}  {manifest['documents'][part]:>11,} documents  {rows:>11,} blocks  {kept:>14,} pieces"
            f"  ({lost:.1%} cut off, {padding:.1%} padding, {manifest['unknown'][part]:.2%} unknown)"
        )
    return "\n".join([*lines, f"blocks of {blocks.length}, vocabulary of {len(blocks.pieces.pieces):,} pieces"])


def _start(parent: int, packer: Packer) -> None:
    global _packer
    import signal

    watch_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # in this worker alone: there is one worker per processor
    _packer = packer


def _in_worker(part: str, number: int, documents: list[Document]) -> tuple[np.ndarray, Counter[str]]:
    return _packer(part, number, documents)
