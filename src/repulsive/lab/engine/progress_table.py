"""Progress of many runs: a live table in a terminal, read from their `metrics.jsonl`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from repulsive.lab.engine.recipe import Recipe
from repulsive.lab.engine.run_reader import METRICS
from repulsive.safety.terminal import one_line
from repulsive.terminal.progress import as_time

_MAX_ROWS = 24


class Planned(Protocol):
    """Specification of a run to train, such as `launch.Spec`."""

    @property
    def recipe(self) -> Recipe: ...
    @property
    def folder(self) -> Path: ...


class RunProgress:
    """Progress of one run, read from its `metrics.jsonl`.

    Args:
        spec: specification of the run.
    """

    def __init__(self, spec: Planned) -> None:
        self.epochs = spec.recipe.training.epochs
        self.epoch = 0.0
        self.loss: float | None = None
        self.dev = ""
        self.state = "waiting"
        self._path = spec.folder / METRICS
        self._file = (-1, 0)  # inode, and number of bytes read
        self._began: tuple[float, float] | None = None  # time and epoch of the first line

    def update(self) -> None:
        """Read the lines written since the last call."""
        for line in self._new_lines():
            if line["kind"] == "train":
                self.epoch, self.loss = line["epoch"], line["loss"]
                self._began = self._began or (time.monotonic(), self.epoch)
                self.state = "training"
            elif line["kind"] == "dev":
                name = next(key for key in line if key not in ("kind", "step"))
                self.dev = f"{name} {line[name]:.4f}"

    @property
    def share(self) -> float:
        """Share of the training that is done, from 0 to 1; 1 for a run that has ended."""
        return min(self.epoch / self.epochs, 1.0) if self.state in ("waiting", "training") else 1.0

    @property
    def time_left(self) -> str:
        """Format the time left, estimated from the speed so far; empty unless the run is training."""
        if self._began is None or self.state != "training":
            return ""
        since, epoch = self._began
        done = self.epoch - epoch
        return as_time((time.monotonic() - since) / done * (self.epochs - self.epoch)) if done > 0 else "?"

    def _new_lines(self) -> list[dict[str, Any]]:
        try:
            with open(self._path, "rb") as file:
                about = os.fstat(file.fileno())
                inode, start = self._file
                if inode != about.st_ino or about.st_size < start:
                    start = 0  # a resumed training has rewritten the file
                file.seek(start)
                complete_lines = file.read().rpartition(b"\n")[0]
        except OSError:
            return []
        if not complete_lines:
            return []
        self._file = (about.st_ino, start + len(complete_lines) + 1)
        return [json.loads(line) for line in complete_lines.split(b"\n")]


class ProgressTable:
    """A live table of runs above a progress bar with the time left for all of them; a context manager.

    Args:
        specs: specifications of the runs.
        console: a rich console; stderr by default.
    """

    def __init__(self, specs: Sequence[Planned], console: Any = None) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn

        self._runs = {spec.folder: RunProgress(spec) for spec in specs}
        self._common_folder = Path(os.path.commonpath([folder.parent.parent for folder in self._runs]))
        self._bar = Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"))
        self._all = self._bar.add_task("", total=len(self._runs), left="")
        self._began: tuple[float, float] | None = None  # time and number of runs done at the first update
        self._live = Live(console=console or Console(stderr=True), auto_refresh=False)

    def __enter__(self) -> ProgressTable:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def ended(self, spec: Planned, outcome: str) -> None:
        """Mark a run as ended, with its outcome, such as "done"."""
        self._runs[spec.folder].update()
        self._runs[spec.folder].state = outcome

    def update(self) -> None:
        """Read the progress of all runs and redraw the table."""
        for run in self._runs.values():
            if run.state in ("waiting", "training"):
                run.update()
        self._update_bar()
        self._live.update(self._table(), refresh=True)

    def _update_bar(self) -> None:
        done, now = sum(run.share for run in self._runs.values()), time.monotonic()
        since, before = self._began = self._began or (now, done)
        left = as_time((now - since) / (done - before) * (len(self._runs) - done)) if done > before else "?"
        ended = sum(run.state not in ("waiting", "training") for run in self._runs.values())
        text = f"{ended} of {len(self._runs)} runs have ended"
        self._bar.update(self._all, completed=done, description=text, left=f"{left} left")

    def _table(self) -> Any:
        from rich.console import Group
        from rich.markup import escape
        from rich.table import Table

        table = Table(box=None, header_style="bold")
        for name in ("run", "epoch", "loss", "dev", "time left"):
            table.add_column(name, justify="left" if name == "run" else "right", no_wrap=True)
        training_first = sorted(self._runs.items(), key=lambda item: item[1].state != "training")
        for folder, run in training_first[:_MAX_ROWS]:
            name = escape(one_line(str(folder.relative_to(self._common_folder))))
            loss = "" if run.loss is None else f"{run.loss:.4f}"
            dev, left = escape(one_line(run.dev)), run.time_left or escape(one_line(run.state))
            table.add_row(name, f"{run.epoch:.2f} / {run.epochs}", loss, dev, left)
        return Group(table, self._bar)
