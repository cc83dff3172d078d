"""Many texts to words, in several processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial

from repulsive.errors import DataError
from repulsive.lab.text.progress import Progress
from repulsive.lab.text.tokens import Tokenizer, tokenizer
from repulsive.safety.parents import watch_parent

_CHUNK = 250  # texts sent to a process at a time; few, so that Ctrl-C need not wait long
_FEW = 5_000_000  # characters that are done before other processes would have started
_split: Tokenizer  # of a worker process
_Words = tuple[str, int]  # the words kept, separated by spaces, and how many there were


def tokenize(
    texts: Sequence[str],
    name: str,
    *,
    lowercase: bool = False,
    longest: int | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> tuple[list[list[str]], list[int]]:
    """The words of many texts.

    Other processes are started only where the texts are many, and import the calling script anew, as Python's
    `spawn` does: guard its work with `if __name__ == "__main__":`, or give `jobs=1`.

    Args:
        texts: the texts.
        name: of the tokenizer, as `tokens.tokenizer` has it.
        lowercase: lower-case the words.
        longest: keep so many words of each; None: all.
        jobs: processes; None: as many as there are processors.
        progress: told how many texts are done.

    Returns:
        The words kept of each text, and how many each had.
    """
    split = tokenizer(name, lowercase=lowercase)  # here too, so that a mistake is met before any process starts
    chunks = [texts[start : start + _CHUNK] for start in range(0, len(texts), _CHUNK)]
    jobs = min(jobs or os.cpu_count() or 1, len(chunks))
    if jobs < 2 or sum(map(len, texts)) < _FEW:
        done: Iterable[list[_Words]] = (_tokenize(split, longest, chunk) for chunk in chunks)
    else:
        done = _pooled(chunks, jobs, name, lowercase, longest)
    words: list[list[str]] = []
    counts: list[int] = []
    same: dict[str, str] = {}  # a word is one object however often it occurs
    for chunk in done:
        for kept, count in chunk:
            words.append([same.setdefault(word, word) for word in kept.split(" ")] if kept else [])
            counts.append(count)
        if progress is not None:
            progress("words", len(words), len(texts))
    return words, counts


def _pooled(
    chunks: Iterable[Sequence[str]], jobs: int, name: str, lowercase: bool, longest: int | None
) -> Iterator[list[_Words]]:
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, spawn, initializer=_start, initargs=(os.getpid(), name, lowercase))
    try:
        with interrupts_held():
            results = pool.map(partial(_in_worker, longest), chunks)
        yield from results
    except BrokenProcessPool:
        raise DataError(
            'a process that makes words ended early: out of memory, or a script without `if __name__ == "__main__":`; '
            "jobs=1 needs no processes"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C waits until the end; processes started meanwhile inherit that it never reaches them.

    A terminal sends it to all processes: one of them is to answer, and not with a traceback for each.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(parent: int, name: str, lowercase: bool) -> None:
    global _split
    watch_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _split = tokenizer(name, lowercase=lowercase)


def _in_worker(longest: int | None, texts: Sequence[str]) -> list[_Words]:
    return _tokenize(_split, longest, texts)


def _tokenize(split: Tokenizer, longest: int | None, texts: Sequence[str]) -> list[_Words]:
    found = []
    for text in texts:
        words = split(text.encode("utf-8", "replace").decode())  # JSON can spell half a character; spaCy cannot take it
        found.append((" ".join(words[:longest]), len(words)))
    return found
