"""One run in this process, or many side by side on one device, each in a process of its own."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from repulsive.errors import ConfigError, RunError
from repulsive.lab.engine.loop import Loop
from repulsive.lab.engine.overview import Overview
from repulsive.lab.engine.processes import TIMEOUT, lost_process
from repulsive.lab.engine.recipe import Recipe
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.stopping import Stopped, listening
from repulsive.lab.engine.task import Task
from repulsive.lab.engine.watch import Live, Log, Watcher
from repulsive.lab.engine.workers import DONE, STOPPED, Crew
from repulsive.safety.terminal import one_line

MakeTask = Callable[[Recipe], Task]  # a function of a module, so that other processes find it
_LOOK = 0.25  # seconds between two looks at signals and, at a terminal, at the runs


@dataclass(frozen=True)
class Spec:
    """One run to be made.

    Args:
        recipe: what to train.
        folder: where to.
        device: "cpu", "cuda" or None for what is there.
    """

    recipe: Recipe
    folder: Path
    device: str | None = None


def train_here(spec: Spec, make_task: MakeTask, quiet: bool = False) -> dict[str, Any]:
    """Train one run in this process, with a live table at a terminal and lines elsewhere.

    Raises:
        Stopped: Ctrl-C or SIGTERM came; everything is saved.
        RepulsiveError: the data, the recipe or the folder are not right, or the loss diverged.
    """
    task = make_task(spec.recipe)
    if quiet or not speaks():
        watcher = Watcher()
    elif sys.stderr.isatty():
        watcher = Live(task.shown, title=str(spec.folder))
    else:
        watcher = Log(sys.stderr, task.shown)
    return _train(spec, task, watcher)


def speaks() -> bool:
    """Whether this process is to print: of those that `torchrun` started, the first."""
    return os.environ.get("RANK", "0") == "0"


def _train(spec: Spec, task: Task, watcher: Watcher, file: TextIO | None = None) -> dict[str, Any]:
    folder = RunFolder(spec.folder, spec.recipe.training.keep)
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
            "to wait, in seconds); run the same command to go on from the last checkpoint"
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
    """Train runs side by side. A run that ended before is left alone.

    On a GPU the processes share it through NVIDIA's multi-process service where that is installed, so that their
    kernels run at the same time; without it they take turns.

    Args:
        specs: the runs.
        make_task: recipe -> task.
        jobs: runs at the same time; 0: as many as there are cores.
        on_end: told of every run as it ends: "done", "stopped" or what went wrong.
        may_start: asked about every run when its turn comes; one that it refuses is left out.
        show: draw a live table of all runs on stderr.

    Raises:
        Stopped: Ctrl-C or SIGTERM came; runs that had begun are saved.
        RunError: some runs failed, after all others have ended.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("torchrun trains one run in many processes; start many runs without it, with --jobs")
    tell = on_end or (lambda spec, how: None)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = min(jobs or cores, len(specs))
    todo, left, failed = list(specs), 0, []
    with ExitStack() as stack:
        stack.enter_context(_shared_gpu(specs))
        stack.enter_context(_threads(max(1, cores // max(1, jobs))))
        request = stack.enter_context(listening())
        crew = stack.enter_context(Crew(functools.partial(_one, make_task=make_task)))
        overview = stack.enter_context(Overview(specs)) if show else None
        asked = False
        while crew.busy or (todo and not asked):
            if request.number is not None and not asked:
                asked = True
                crew.stop()
            while todo and not asked and crew.busy < jobs:
                spec = todo.pop(0)
                if may_start is None or may_start(spec):
                    crew.start(spec)
            for spec, how in crew.ended(_LOOK):
                tell(spec, how)
                left += how == STOPPED
                if how != DONE:
                    failed.append(f"{spec.folder}: {how}")
                if overview is not None:
                    overview.ended(spec, how)
            if overview is not None:
                overview.look()
    if request.number is not None and (left := left + len(todo)):
        raise Stopped(f"stopped with {left} of {len(specs)} runs to go; the same command goes on", request.number)
    if failed:
        raise RunError(f"{len(failed)} of {len(specs)} runs failed; the first: {failed[0]}")


def _one(spec: Spec, file: TextIO, make_task: MakeTask) -> None:
    """Train one run in a worker."""
    task = make_task(spec.recipe)
    _train(spec, task, Log(file, task.shown), file)


@contextmanager
def _warnings_as_lines(file: TextIO | None) -> Iterator[None]:
    """One line for a warning, without the code it came from; None is stderr, whatever that is by then."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(
            f"repulsive: {one_line(str(message))}", file=file or sys.stderr
        )
        yield


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """So many threads for each worker; a number of the user's own stays."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = before or str(count)
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]


@contextmanager
def _shared_gpu(specs: Sequence[Spec]) -> Iterator[None]:
    """Start NVIDIA's multi-process service for the length of a block, if there is a GPU to share and none runs yet."""
    control = shutil.which("nvidia-cuda-mps-control")
    wanted = torch.cuda.is_available() and any(spec.device != "cpu" for spec in specs)
    if not wanted or control is None or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="repulsive-mps-") as folder:
        places = dict.fromkeys(("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"), folder)
        started = subprocess.run([control, "-d"], env=os.environ | places, capture_output=True, check=False)
        if started.returncode:  # not allowed to: processes take turns
            yield
            return
        os.environ.update(places)
        try:
            yield
        finally:
            subprocess.run([control], input=b"quit\n", env=dict(os.environ), capture_output=True, check=False)
            for name in places:
                del os.environ[name]
