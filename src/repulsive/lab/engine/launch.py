"""Train one run in this process, or many side by side in worker processes."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from repulsive.errors import ConfigError, RunError
from repulsive.lab.engine.gpu_sharing import shared_gpu
from repulsive.lab.engine.loop import Loop
from repulsive.lab.engine.processes import TIMEOUT, lost_process
from repulsive.lab.engine.progress import Live, Log, Watcher
from repulsive.lab.engine.progress_table import ProgressTable
from repulsive.lab.engine.recipe import Recipe
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.stop_signals import Stopped, listening
from repulsive.lab.engine.task import Task
from repulsive.lab.engine.workers import DONE, STOPPED, WorkerPool
from repulsive.safety.terminal import one_line

MakeTask = Callable[[Recipe], Task]  # defined in a module, so that it can be pickled for workers
_POLL_SECONDS = 0.25  # between two checks for signals and, in a terminal, updates of the table


@dataclass(frozen=True)
class Spec:
    """Specification of a run to train: its recipe, folder and device.

    Args:
        recipe: recipe of the run.
        folder: folder of the run.
        device: "cpu", "cuda", or None for a GPU where there is one.
        loggers: names of loggers besides TensorBoard.
    """

    recipe: Recipe
    folder: Path
    device: str | None = None
    loggers: tuple[str, ...] = ()


def train_here(spec: Spec, make_task: MakeTask, quiet: bool = False) -> dict[str, Any]:
    """Train one run in this process, with a live table in a terminal and log lines elsewhere.

    Args:
        spec: specification of the run to train.
        make_task: function that makes the task of a recipe.
        quiet: print no progress.

    Returns:
        The contents of `result.json`.

    Raises:
        Stopped: Ctrl-C, SIGTERM or SIGUSR1 was received; the run is saved.
        RepulsiveError: the data, the recipe or the folder are invalid, or the loss diverged.
    """
    task = make_task(spec.recipe)
    if quiet or not prints_progress():
        watcher = Watcher()
    elif sys.stderr.isatty():
        watcher = Live(task.shown, title=str(spec.folder))
    else:
        watcher = Log(sys.stderr, task.shown)
    return _train(spec, task, watcher)


def prints_progress() -> bool:
    """Whether this process prints progress: only the first of the ranks that `torchrun` started does."""
    return os.environ.get("RANK", "0") == "0"


def _train(spec: Spec, task: Task, watcher: Watcher, file: TextIO | None = None) -> dict[str, Any]:
    folder = RunFolder(spec.folder, spec.recipe.training.keep, spec.loggers)
    try:
        with _warnings_as_lines(file):
            return Loop(task, spec.recipe, folder, watcher, spec.device).run()
    except torch.OutOfMemoryError:
        raise RunError(f"{spec.folder}: out of memory on the device; lower --jobs or training.batch") from None
    except MemoryError:
        raise RunError(f"{spec.folder}: out of memory; lower --jobs or training.batch") from None
    except RuntimeError as error:
        if not lost_process(error):
            raise
        raise RunError(
            f"{spec.folder}: another process of this training died or did not answer in time ({TIMEOUT} sets how long "
            "to wait, in seconds); run the same command to resume from the last checkpoint"
        ) from None
    finally:
        watcher.close()
        folder.close()


def train_many(
    specs: Sequence[Spec],
    make_task: MakeTask,
    jobs: int = 0,
    on_end: Callable[[Spec, str], None] | None = None,
    *,
    may_start: Callable[[Spec], bool] | None = None,
    show: bool = False,
) -> None:
    """Train runs side by side in worker processes. Runs that are finished are not trained again.

    Workers share a GPU through NVIDIA's multi-process service where it is installed; without it they take turns.

    Args:
        specs: specifications of the runs to train.
        make_task: function that makes the task of a recipe.
        jobs: number of workers; 0: as many as there are cores.
        on_end: called when a run ends, with its outcome: "done", "stopped" or an error message.
        may_start: called before a run starts; the run is left out if it returns False.
        show: draw a live table of all runs on stderr.

    Raises:
        Stopped: Ctrl-C, SIGTERM or SIGUSR1 was received; runs that had started are saved.
        RunError: some runs failed; all others have ended.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("torchrun trains one run in several processes; use --jobs without torchrun for several runs")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = min(jobs or cores, len(specs))
    waiting, stopped, failed = list(specs), 0, []
    with ExitStack() as stack:
        stack.enter_context(shared_gpu(needed=any(spec.device != "cpu" for spec in specs)))
        stack.enter_context(_threads(max(1, cores // max(1, jobs))))
        request = stack.enter_context(listening())
        workers = stack.enter_context(WorkerPool(functools.partial(_train_in_worker, make_task=make_task)))
        table = stack.enter_context(ProgressTable(specs)) if show else None
        stopping = False
        while workers.busy or (waiting and not stopping):
            if request.number is not None and not stopping:
                stopping = True
                workers.stop()
            while waiting and not stopping and workers.busy < jobs:
                spec = waiting.pop(0)
                if may_start is None or may_start(spec):
                    workers.start(spec)
            for spec, outcome in workers.ended(_POLL_SECONDS):
                if on_end is not None:
                    on_end(spec, outcome)
                stopped += outcome == STOPPED
                if outcome != DONE:
                    failed.append(f"{spec.folder}: {outcome}")
                if table is not None:
                    table.ended(spec, outcome)
            if table is not None:
                table.update()
    if request.number is not None and (left := stopped + len(waiting)):
        raise Stopped(f"stopped with {left} of {len(specs)} runs left; run the same command to resume", request.number)
    if failed:
        raise RunError(f"{len(failed)} of {len(specs)} runs failed; the first: {failed[0]}")


def _train_in_worker(spec: Spec, file: TextIO, make_task: MakeTask) -> None:
    task = make_task(spec.recipe)
    _train(spec, task, Log(file, task.shown), file)


@contextmanager
def _warnings_as_lines(file: TextIO | None) -> Iterator[None]:
    """Print each warning as one line, without its source line, to `file` or else to stderr."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(
            f"repulsive: {one_line(str(message))}", file=file or sys.stderr
        )
        yield


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Set the number of threads of each worker, unless the user has set OMP_NUM_THREADS."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = before or str(count)
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
