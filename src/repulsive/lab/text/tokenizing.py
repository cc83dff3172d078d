"""Tokenise many texts in several processes."""

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

_CHUNK = 250  # texts sent to a process at a time; few, so that Ctrl-C takes effect soon
_FEW = 5_000_000  # characters; fewer are tokenised before other processes would have started
_split: Tokenizer  # tokenizer of a worker process
_Words = tuple[str, int]  # the words kept, separated by spaces, and how many the text had


def tokenize(
    texts: Sequence[str],
    name: str,
    *,
    lowercase: bool = False,
    longest: int | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> tuple[list[list[str]], list[int]]:
    """Split texts into words.

    Other processes are started only for many texts. They import the calling script again, as Python's `spawn` does:
    guard it with `if __name__ == "__main__":`, or give `jobs=1`.

    Args:
        texts: the texts.
        name: name of the tokenizer; see `tokens.tokenizer`.
        lowercase: lower-case the words.
        longest: maximum number of words to keep of a text; None: unlimited.
        jobs: number of processes; None: one per processor.
        progress: called with the number of texts done.

    Returns:
        The words kept of each text, and how many words each text had.
    """
    split = tokenizer(name, lowercase=lowercase)  # made here too, so that an error is raised before any process starts
    chunks = [texts[start : start + _CHUNK] for start in range(0, len(texts), _CHUNK)]
    jobs = min(jobs or os.cpu_count() or 1, len(chunks))
    if jobs < 2 or sum(map(len, texts)) < _FEW:
        done: Iterable[list[_Words]] = (_tokenize(split, longest, chunk) for chunk in chunks)
    else:
        done = _pooled(chunks, jobs, name, lowercase, longest)
    words: list[list[str]] = []
    counts: list[int] = []
    same: dict[str, str] = {}  # share one object between all occurrences of a word
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
        with hold_interrupts():
            results = pool.map(partial(_in_worker, longest), chunks)
        yield from results
    except BrokenProcessPool:
        raise DataError(
            'a worker process ended early: out of memory, or a script without `if __name__ == "__main__":`; '
            "jobs=1 uses no worker processes"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block; processes started in the block never receive Ctrl-C.

    A terminal sends Ctrl-C to all processes, and each would print a traceback.
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
    tokenized = []
    for text in texts:
        words = split(text.encode("utf-8", "replace").decode())  # spaCy cannot handle lone surrogates
        tokenized.append((" ".join(words[:longest]), len(words)))
    return tokenized
