"""Requeue the SLURM job of a training that SIGUSR1 stopped.

SLURM sends SIGUSR1 shortly before the time limit of a job if the job asks for it (`sbatch --signal=B:USR1@120`). It
sends SIGTERM for `scancel`, and to a pre-empted job, which it requeues itself. So only SIGUSR1 requeues a job here.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

from repulsive.errors import ConfigError
from repulsive.lab.engine.stop_signals import REQUEUE_SIGNAL, Stopped

_TIMEOUT_SECONDS = 60


@contextmanager
def requeueing(wanted: bool) -> Iterator[None]:
    """Requeue this SLURM job if SIGUSR1 stops the training within a block.

    Only the first rank of a training with several processes calls `scontrol`.

    Args:
        wanted: whether the user asked for it; if not, the block runs as it is.

    Raises:
        ConfigError: this is a SLURM job, but `scontrol` is not on PATH.
        Stopped: a signal stopped the training; after SIGUSR1 the message says whether the job was requeued.
    """
    if not wanted:
        yield
        return
    if job_id(os.environ) is not None and shutil.which("scontrol") is None:
        raise ConfigError("--requeue: scontrol is not on PATH; add the folder of SLURM's commands to PATH")
    try:
        with _stop_before_training():
            yield
    except Stopped as stopped:
        if stopped.number != REQUEUE_SIGNAL or os.environ.get("RANK", "0") != "0":
            raise
        raise Stopped(f"{stopped}; {_requeue(job_id(os.environ))}", stopped.number) from None


def job_id(environment: Mapping[str, str]) -> str | None:
    """Return the id of this SLURM job as `scontrol` expects it; None outside of SLURM.

    A task of a job array is named ARRAY_TASK: the plain id of its last task would requeue the whole array.
    """
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"{array}_{task}"
    return environment.get("SLURM_JOB_ID") or None


def _requeue(job: str | None) -> str:
    """Call `scontrol requeue` and describe the outcome."""
    if job is None:
        return "not requeued, because SLURM_JOB_ID is not set"
    try:
        with _ignoring_sigterm():  # SLURM ends the job as soon as it is requeued
            done = subprocess.run(
                ["scontrol", "requeue", job], capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"job {job} was not requeued ({error})"
    if done.returncode:
        why = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        return f"job {job} was not requeued (scontrol: {why})"
    return f"requeued job {job}"


@contextmanager
def _stop_before_training() -> Iterator[None]:
    """Stop on SIGUSR1 also while data are loaded; the training loop replaces this handler while it runs."""
    if REQUEUE_SIGNAL is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> NoReturn:
        raise Stopped("stopped outside of the training loop", number)

    before = signal.signal(REQUEUE_SIGNAL, stop)
    try:
        yield
    finally:
        signal.signal(REQUEUE_SIGNAL, before)


@contextmanager
def _ignoring_sigterm() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
