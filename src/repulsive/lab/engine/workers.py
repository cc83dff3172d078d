"""Worker processes that train runs side by side. A worker that dies loses its own run only."""

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
from repulsive.lab.engine.stop_signals import REQUEUE_SIGNAL, Stopped
from repulsive.safety.files import open_append
from repulsive.safety.parents import watch_parent
from repulsive.safety.terminal import printable

DONE, STOPPED = "done", "stopped"
LOG = "log.txt"


class Job(Protocol):
    """A job for a worker; it must be picklable."""

    @property
    def folder(self) -> Path:
        """Folder to which the job's log is written."""
        ...


Train = Callable[[Any, TextIO], object]  # takes a job and the file to print to; defined in a module, so it is picklable


@dataclass(eq=False)
class _Worker:
    process: Any
    pipe: Connection
    job: Any = None


class WorkerPool:
    """Worker processes, started when needed and reused; a context manager that ends them all.

    Args:
        train: function that does a job.
    """

    def __init__(self, train: Train) -> None:
        self._train = train
        self._workers: list[_Worker] = []
        resource_tracker.ensure_running()  # before `_start_worker`: starting it unblocks the signals blocked there

    @property
    def busy(self) -> int:
        """Number of workers with a job."""
        return sum(worker.job is not None for worker in self._workers)

    def start(self, job: Job) -> None:
        """Give a job to an idle worker, or to a new one."""
        worker = next((w for w in self._workers if w.job is None), None) or self._start_worker()
        worker.job = job
        try:
            worker.pipe.send(job)
        except OSError:  # the worker died while it was idle
            self._drop(worker)
            self.start(job)

    def ended(self, seconds: float) -> list[tuple[Any, str]]:
        """List jobs that have ended, each with its outcome: "done", "stopped", or an error message.

        Args:
            seconds: how long to wait for the first job to end.
        """
        busy = [worker for worker in self._workers if worker.job is not None]
        ready = wait([worker.pipe for worker in busy], seconds)
        ended = []
        for worker in [worker for worker in busy if worker.pipe in ready]:
            job = worker.job
            try:
                outcome = worker.pipe.recv()
            except (EOFError, OSError):
                outcome = self._exit_reason(worker)
            if outcome == DONE:
                worker.job = None
            else:
                self._drop(worker)  # a failure may leave the process, or its GPU, in any state
            ended.append((job, outcome))
        return ended

    def stop(self) -> None:
        """Ask every worker to save and end."""
        for worker in self._workers:
            worker.process.terminate()

    def close(self) -> None:
        """Kill all workers."""
        for worker in list(self._workers):
            worker.process.kill()
            self._drop(worker)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start_worker(self) -> _Worker:
        here, there = get_context("spawn").Pipe()
        process = get_context("spawn").Process(target=_serve, args=(there, self._train, os.getpid()), daemon=True)
        with _blocked(signal.SIGINT):  # stays blocked in the worker: its parent handles Ctrl-C
            process.start()
        there.close()  # so that the pipe closes when the worker ends
        worker = _Worker(process, here)
        self._workers.append(worker)
        return worker

    def _drop(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.pipe.close()  # an idle worker ends when its pipe closes

    def _exit_reason(self, worker: _Worker) -> str:
        worker.process.join()
        code = worker.process.exitcode
        if code in (-signal.SIGTERM, -(REQUEUE_SIGNAL or signal.SIGTERM)):  # arrived before the training loop ran
            return STOPPED
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"its process died ({name}); run the same command to resume"


@contextmanager
def _blocked(number: int) -> Iterator[None]:
    """Block a signal within a `with` block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: Connection, train: Train, parent: int) -> None:
    """Main function of a worker: do jobs until the pipe closes or the parent ends."""
    watch_parent(parent)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        pipe.send(_work(job, train))


def _work(job: Job, train: Train) -> str:
    """Do a job, log its output to its folder, and return its outcome."""
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        log = TextIOWrapper(open_append(job.folder / LOG), encoding="utf-8", errors="replace")
        with log as file, redirect_stdout(file), redirect_stderr(file):
            return _logged(job, train, file)
    except OSError as error:
        return f"{LOG}: cannot be written ({error.strerror})"
    finally:
        gc.collect()  # a training loop has reference cycles, and the next run needs its memory
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _within(folder: Path, message: str) -> str:
    """Remove the folder at the start of a message, because outcomes are shown behind the folder's name."""
    for separator in (": ", "/"):
        message = message.removeprefix(f"{folder}{separator}")
    return message


def _logged(job: Job, train: Train, file: TextIO) -> str:
    try:
        train(job, file)
    except Stopped as stopped:
        print(printable(str(stopped)), file=file)
        return STOPPED
    except RepulsiveError as error:
        print(printable(str(error)), file=file)
        return _within(job.folder, " ".join(str(error).split()))
    except Exception as error:
        traceback.print_exc(file=file)
        first = str(error).partition("\n")[0]
        return f"{type(error).__name__}: {first} (traceback in {job.folder / LOG})"
    return DONE
