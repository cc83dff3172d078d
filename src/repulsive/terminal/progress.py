"""Progress on stderr: a bar with the time left at a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from repulsive.safety.terminal import one_line

Progress = Callable[[str, int, int], None]  # stage, steps done, total number of steps (0: unknown)
EVERY = 10.0  # seconds between two plain lines of one stage


def no_progress(stage: str, done: int, total: int) -> None:
    """Show nothing."""


def as_time(seconds: float) -> str:
    """Format seconds as h:mm:ss.

    Example:
        >>> as_time(90)
        '0:01:30'
    """
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


@contextmanager
def progress_bar(*, lines: bool = True) -> Iterator[Progress]:
    """Show the progress of one stage at a time, and warnings as single lines above the bar.

    The bar appears with the first step, so that another live display may be shown before it.
    Without a terminal, a stage that takes longer than `EVERY` seconds prints a line with the time left every `EVERY`
    seconds; shorter stages print nothing.

    Args:
        lines: print these lines; False shows nothing without a terminal.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield _Lines() if lines else no_progress
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Bar(*columns, console=console, transient=True)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: console.print(
            f"repulsive: {one_line(str(message))}", markup=False, soft_wrap=True
        )

        def show(stage: str, done: int, total: int) -> None:
            bar.start()
            task = bar.tasks[0] if bar.tasks else None
            is_same = task is not None and (task.description, task.total) == (one_line(stage), total or None)
            if task is None or not is_same or done < task.completed:  # the same stage of another model starts at 0
                for old in bar.task_ids:  # the total of a bar cannot be reset
                    bar.remove_task(old)
                bar.add_task(one_line(stage), total=total or None)
            bar.update(bar.task_ids[0], completed=done)

        try:
            yield show
        finally:
            bar.stop()


class _Lines:
    """Plain lines with the time left, for files and pipes."""

    def __init__(self) -> None:
        self._stage, self._began, self._printed, self._first = "", 0.0, 0.0, 0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._began, self._printed, self._first = stage, now, now, done
            return
        if now - self._printed < EVERY:
            return
        self._printed = now
        line = f"{stage}: {done:,}"
        if total:
            line += f" of {total:,}"
            if done > self._first:
                left = (now - self._began) / (done - self._first) * (total - done)
                line += f", {as_time(left)} left"
        print(one_line(line), file=sys.stderr, flush=True)
