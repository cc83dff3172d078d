"""One run in this process, or many side by side on one device, each in a process of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from repulsive.errors import RepulsiveError, RunError
from repulsive.training.loop import Loop, Stopped
from repulsive.training.recipe import Recipe
from repulsive.training.runs import RunFolder
from repulsive.training.task import Task
from repulsive.training.watch import Live, Log, Watcher

MakeTask = Callable[[Recipe], Task]  # a function of a module, so that other processes find it
_LOG = "log.txt"


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
    if quiet or os.environ.get("RANK", "0") != "0":
        watcher = Watcher()
    elif sys.stderr.isatty():
        watcher = Live(task.shown, title=str(spec.folder))
    else:
        watcher = Log(sys.stderr, task.shown)
    return _train(spec, task, watcher)


def _train(spec: Spec, task: Task, watcher: Watcher) -> dict[str, Any]:
    folder = RunFolder(spec.folder, spec.recipe.training.keep)
    try:
        return Loop(task, spec.recipe, folder, watcher, spec.device).run()
    finally:
        watcher.close()
        folder.close()


def train_many(
    specs: Sequence[Spec], make_task: MakeTask, jobs: int = 0, on_end: Callable[[Spec, str], None] | None = None
) -> None:
    """Train runs side by side. A run that ended before is left alone.

    On a GPU the processes share it through NVIDIA's multi-process service where that is installed, so that their
    kernels run at the same time; without it they take turns.

    Args:
        specs: the runs.
        make_task: recipe -> task.
        jobs: runs at the same time; 0: as many as there are cores.
        on_end: told of every run as it ends: "done", "stopped" or what went wrong.

    Raises:
        Stopped: Ctrl-C; runs that had begun are saved.
        RunError: some runs failed, after all others have ended.
    """
    tell = on_end or (lambda spec, how: None)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = min(jobs or cores, len(specs))
    failed: list[str] = []
    with _shared_gpu(specs), _threads(max(1, cores // jobs)):
        pool = ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_prepare_worker, initargs=(os.getpid(),))
        waiting: dict[Future[str], Spec] = {pool.submit(_work, spec, make_task): spec for spec in specs}
        try:
            while waiting:
                ended, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in ended:
                    spec = waiting.pop(future)
                    how = _outcome(future)
                    tell(spec, how)
                    if how != "done":
                        failed.append(f"{spec.folder}: {how}")
        except KeyboardInterrupt:
            _stop(pool)
            raise Stopped(f"stopped with {len(waiting)} of {len(specs)} runs to go; the same command goes on") from None
        finally:
            pool.shutdown(cancel_futures=True)
    if failed:
        raise RunError(f"{len(failed)} of {len(specs)} runs failed; the first: {failed[0]}")


def _work(spec: Spec, make_task: MakeTask) -> str:
    """Train one run in a worker; what it would have printed goes into the run's folder."""
    spec.folder.mkdir(parents=True, exist_ok=True)
    with open(spec.folder / _LOG, "a", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        try:
            task = make_task(spec.recipe)
            _train(spec, task, Log(file, task.shown))
        except Stopped:
            return "stopped"
        except RepulsiveError as error:
            print(error, file=file)
            return " ".join(str(error).split())
        except torch.OutOfMemoryError as error:
            print(error, file=file)
            return "out of memory on the device; lower --jobs or training.batch"
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return "done"


def _outcome(future: Future[str]) -> str:
    error = future.exception()
    if error is None:
        return future.result()
    return f"{type(error).__name__}: {error}".split("\n")[0]


def _prepare_worker(parent: int) -> None:
    """Ctrl-C is the parent's to answer, and a worker does not outlive its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _stop(pool: ProcessPoolExecutor) -> None:
    """Ask every worker to save and end."""
    for process in list((pool._processes or {}).values()):
        if process.is_alive():
            process.terminate()


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
