"""Train runs side by side until the time is up; every finished run leaves one record."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from studies.tuning.choices import dev_loss
from studies.tuning.records import Job, Records

from repulsive.lab.engine.workers import DONE, LOG, WorkerPool

ATTEMPTS = 2  # for a run that fails for another reason than divergence
POLL = 0.25  # seconds between two checks


def train_side_by_side(
    pool: WorkerPool,
    records: Records,
    next_jobs: Callable[[float], Iterable[tuple[float, Job]]],
    *,
    jobs: int,
    end: float,
) -> None:
    """Train all runs that can finish in time. A run in progress at the end is lost; the next call trains it again.

    Args:
        pool: workers that write the record of a run to its folder.
        records: finished runs.
        next_jobs: function from the seconds left to the known runs without a record, the most urgent first, each with
            the seconds that it is expected to take.
        jobs: runs side by side.
        end: time of `time.monotonic` at which to stop.
    """
    started = time.monotonic()
    running: set[tuple[Any, ...]] = set()
    failures: dict[tuple[Any, ...], int] = {}
    while time.monotonic() < end:
        left = end - time.monotonic()
        for seconds, new in next_jobs(left):
            if pool.busy == jobs:
                break
            if new.key not in running and seconds <= left:
                running.add(new.key)
                pool.start(new)
        if not pool.busy:
            break
        for job, outcome in pool.ended(POLL):
            if getattr(job, "key", None) not in running:  # a job that was started before
                continue
            running.discard(job.key)
            now = f"{time.monotonic() - started:4.0f} s"
            if outcome == DONE:
                record = records.finish(job)
                print(now, *job.key, f"dev NLL {dev_loss(record):.4f}, {record['seconds']:.1f} s", flush=True)
                continue
            failures[job.key] = failures.get(job.key, 0) + 1
            print(now, *job.key, outcome, flush=True)
            _print_log(job)
            if failures[job.key] == ATTEMPTS:
                records.fail(job, outcome)


def _print_log(job: Job) -> None:
    path = job.folder / LOG
    if path.is_file():
        print(path.read_text(errors="replace")[-1500:], flush=True)


@contextmanager
def work_folder() -> Iterator[Path]:
    """Make a temporary folder for runs in progress, in memory if possible."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as work:
        yield Path(work)
