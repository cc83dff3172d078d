"""Progress of one training: silent, as log lines, or as a live table in a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from repulsive.safety.terminal import one_line, printable
from repulsive.terminal.progress import as_time


class Watcher:
    """Receives the events of a run. This base class ignores them."""

    def started(self, step: int, total: int, per_epoch: int) -> None:
        """Handle the start of a training, or its resumption, at `step` of `total`."""

    def logged(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Handle a new line of `metrics.jsonl`."""

    def finished(self, result: Mapping[str, Any]) -> None:
        """Handle the end of the training, which may have ended in an earlier call."""

    def close(self) -> None:
        """Release resources; no more events follow."""


class Log(Watcher):
    """Log lines, for files and pipes: one per evaluation, and one a minute in between.

    Args:
        file: where to print.
        columns: metrics of the validation set to show.
        every: seconds between two lines without an evaluation.
    """

    def __init__(self, file: TextIO, columns: Sequence[str], every: float = 60.0) -> None:
        self._file = file
        self._columns = columns
        self._every = every
        self._printed = time.monotonic()
        self._loss = float("nan")
        self._clock = Clock()

    def started(self, step: int, total: int, per_epoch: int) -> None:
        self._clock.start(step, total)
        note = f"resuming from step {step}" if step else "starting"
        self._print(f"{note}: {total} steps, {per_epoch} per epoch")

    def logged(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        if kind == "train":
            self._loss = values["loss"]
            if time.monotonic() - self._printed >= self._every:
                self._print(f"step {step}  loss {self._loss:.4f}  {self._clock.left(step)} left")
        elif kind == "dev":
            scores = self._scores(values)
            self._print(f"step {step}  loss {self._loss:.4f}  dev {scores}  {self._clock.left(step)} left")

    def finished(self, result: Mapping[str, Any]) -> None:
        self._print(f"test (weights of step {result['best_step']}): {self._scores(result['test'])}")

    def _scores(self, metrics: Mapping[str, float]) -> str:
        return "  ".join(f"{name} {metrics[name]:.4f}" for name in self._columns if name in metrics)

    def _print(self, line: str) -> None:
        self._printed = time.monotonic()
        print(printable(line), file=self._file, flush=True)


class Live(Watcher):
    """A progress bar with the time left, and a table with one row per evaluation.

    Args:
        columns: metrics of the validation set to show.
        title: title of the table.
    """

    def __init__(self, columns: Sequence[str], title: str = "") -> None:
        from rich.console import Console, Group
        from rich.live import Live as RichLive
        from rich.markup import escape
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Table

        self._columns = list(columns)
        self._loss = self._ratio = float("nan")
        self._table = Table(title=escape(one_line(title)) or None, box=None, header_style="bold")
        for name in ("epoch", "loss", *(f"dev {name}" for name in self._columns), "repulsion / drive"):
            self._table.add_column(name, justify="right")
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        )
        self._bar = self._progress.add_task("training", total=None)
        self._live = RichLive(Group(self._table, self._progress), console=Console(stderr=True), refresh_per_second=4)
        self._per_epoch = 1

    def started(self, step: int, total: int, per_epoch: int) -> None:
        self._per_epoch = per_epoch
        self._progress.reset(self._bar, total=total, completed=step)
        self._live.start()

    def logged(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        self._progress.update(self._bar, completed=step)
        if kind == "train":
            self._loss = values["loss"]
            self._progress.update(self._bar, description=f"loss {self._loss:.4f}")
        elif kind == "heads":
            self._ratio = values.get("ratio", float("nan"))
        elif kind == "dev":
            cells = [f"{values[name]:.4f}" if name in values else "" for name in self._columns]
            ratio = f"{self._ratio:.3f}" if self._ratio == self._ratio else ""
            self._table.add_row(f"{step / self._per_epoch:.2f}", f"{self._loss:.4f}", *cells, ratio)

    def finished(self, result: Mapping[str, Any]) -> None:
        self.close()

    def close(self) -> None:
        self._live.stop()


class Clock:
    """Estimate the time left from the speed since the start."""

    def start(self, step: int, total: int) -> None:
        self._step, self._total, self._time = step, total, time.monotonic()

    def left(self, step: int) -> str:
        """Format the time left as h:mm:ss; "?" before the first step is done."""
        done = step - self._step
        if done < 1:
            return "?"
        return as_time((time.monotonic() - self._time) / done * (self._total - step))
