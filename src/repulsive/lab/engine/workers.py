"""Processes that train one run after the other, side by side. One that dies takes nothing with it but its own run."""

from __future__ import annotations

import gc
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import TextIOWrapper
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch

from repulsive.errors import RepulsiveError
from repulsive.lab.engine.stopping import Stopped
from repulsive.safety.files import open_append
from repulsive.safety.parents import watch_parent
from repulsive.safety.terminal import printable

DONE, STOPPED = "done", "stopped"
LOG = "log.txt"


class Job(Protocol):
    """What a worker is given; it has to be picklable."""

    @property
    def folder(self) -> Path:
        """Where the log goes."""
        ...


Train = Callable[[Any, TextIO], object]  # a job, and where to print; a function of a module, so that workers find it


@dataclass(eq=False)
class _Worker:
    process: Any
    pipe: Connection
    job: Any = None


class Crew:
    """Workers, started as they are needed and used again; leaving the block ends them all.

    Args:
        train: does a job.
    """

    def __init__(self, train: Train) -> None:
        self._train = train
        self._workers: list[_Worker] = []
        resource_tracker.ensure_running()  # it lets through the signals that `_start` holds back, so it comes first

    @property
    def busy(self) -> int:
        """How many are at work."""
        return sum(worker.job is not None for worker in self._workers)

    def start(self, job: Job) -> None:
        """Give a job to a worker that has none."""
        worker = next((w for w in self._workers if w.job is None), None) or self._hire()
        worker.job = job
        try:
            worker.pipe.send(job)
        except OSError:  # it died while it was idle
            self._dismiss(worker)
            self.start(job)

    def ended(self, seconds: float) -> list[tuple[Any, str]]:
        """Jobs that ended, each with how: "done", "stopped", or what went wrong; waits so long for the first."""
        busy = [worker for worker in self._workers if worker.job is not None]
        ready = wait([worker.pipe for worker in busy], seconds)
        found = []
        for worker in [worker for worker in busy if worker.pipe in ready]:
            job = worker.job
            try:
                how = worker.pipe.recv()
            except (EOFError, OSError):
                how = self._death(worker)
            if how == DONE:
                worker.job = None
            else:
                self._dismiss(worker)  # what went wrong may have left the process, or its GPU, in any state
            found.append((job, how))
        return found

    def stop(self) -> None:
        """Ask every worker to save and end."""
        for worker in self._workers:
            worker.process.terminate()

    def close(self) -> None:
        """End all of them at once; who has nothing to do loses nothing."""
        for worker in list(self._workers):
            worker.process.kill()
            self._dismiss(worker)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _hire(self) -> _Worker:
        here, there = get_context("spawn").Pipe()
        process = get_context("spawn").Process(target=_serve, args=(there, self._train, os.getpid()), daemon=True)
        with _held_back(signal.SIGINT):  # for ever in the worker: Ctrl-C is its parent's to answer
            process.start()
        there.close()  # so that the pipe ends when the worker does
        worker = _Worker(process, here)
        self._workers.append(worker)
        return worker

    def _dismiss(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.pipe.close()  # it finds that nothing more comes, and leaves

    def _death(self, worker: _Worker) -> str:
        worker.process.join()
        code = worker.process.exitcode
        if code == -signal.SIGTERM:
            return STOPPED
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"its process died ({name}); the same command goes on with it"


@contextmanager
def _held_back(number: int) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: Connection, train: Train, parent: int) -> None:
    """What a worker does: jobs, until none comes or the parent is gone."""
    watch_parent(parent)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        pipe.send(_work(job, train))


def _work(job: Job, train: Train) -> str:
    """Do a job and say how it ended; what it prints goes into its folder."""
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        log = TextIOWrapper(open_append(job.folder / LOG), encoding="utf-8", errors="replace")
        with log as file, redirect_stdout(file), redirect_stderr(file):
            return _logged(job, train, file)
    except OSError as error:
        return f"{job.folder / LOG}: cannot be written ({error.strerror})"
    finally:
        gc.collect()  # a loop refers to itself; the next run needs its memory
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _logged(job: Job, train: Train, file: TextIO) -> str:
    try:
        train(job, file)
    except Stopped as stopped:
        print(printable(str(stopped)), file=file)
        return STOPPED
    except RepulsiveError as error:
        print(printable(str(error)), file=file)
        return " ".join(str(error).split())
    except Exception as error:
        traceback.print_exc(file=file)
        first = str(error).partition("\n")[0]
        return f"{type(error).__name__}: {first} (all of it: {job.folder / LOG})"
    return DONE
