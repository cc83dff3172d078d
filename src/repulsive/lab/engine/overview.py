"""Many runs at a glance, at a terminal: one row each, read from the lines they write."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from repulsive.lab.engine.recipe import Recipe
from repulsive.lab.engine.runs import METRICS
from repulsive.lab.engine.watch import as_time
from repulsive.safety.terminal import one_line

_MOST = 24  # rows; the others are counted


class Planned(Protocol):
    """A run to be made."""

    @property
    def recipe(self) -> Recipe: ...
    @property
    def folder(self) -> Path: ...


class Progress:
    """How far a run is, by its `metrics.jsonl`.

    Args:
        spec: the run.
    """

    def __init__(self, spec: Planned) -> None:
        self.epochs = spec.recipe.training.epochs
        self.epoch = 0.0
        self.loss: float | None = None
        self.dev = ""
        self.state = "waiting"
        self._path = spec.folder / METRICS
        self._file = (-1, 0)  # inode, and how much of it has been read
        self._began: tuple[float, float] | None = None  # when it was first seen, and its epoch then

    def look(self) -> None:
        """Read what was written since the last look."""
        for line in self._new_lines():
            if line["kind"] == "train":
                self.epoch, self.loss = line["epoch"], line["loss"]
                self._began = self._began or (time.monotonic(), self.epoch)
                self.state = "training"
            elif line["kind"] == "dev":
                name = next(key for key in line if key not in ("kind", "step"))
                self.dev = f"{name} {line[name]:.4f}"

    @property
    def left(self) -> str:
        """Time left, judged by what was seen of it."""
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
                    start = 0  # a resumed training has written it anew
                file.seek(start)
                whole = file.read().rpartition(b"\n")[0]
        except OSError:
            return []
        if not whole:
            return []
        self._file = (about.st_ino, start + len(whole) + 1)
        return [json.loads(line) for line in whole.split(b"\n")]


class Overview:
    """A live table of runs; a context manager.

    Args:
        specs: the runs.
        console: of rich; stderr by default.
    """

    def __init__(self, specs: Sequence[Planned], console: Any = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._runs = {spec.folder: Progress(spec) for spec in specs}
        self._above = Path(os.path.commonpath([folder.parent.parent for folder in self._runs]))
        self._live = Live(console=console or Console(stderr=True), auto_refresh=False)

    def __enter__(self) -> Overview:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def ended(self, spec: Planned, how: str) -> None:
        """Told how a run ended."""
        self._runs[spec.folder].look()
        self._runs[spec.folder].state = how

    def look(self) -> None:
        """Draw what has changed."""
        for run in self._runs.values():
            if run.state in ("waiting", "training"):
                run.look()
        self._live.update(self._table(), refresh=True)

    def _table(self) -> Any:
        from rich.markup import escape
        from rich.table import Table

        table = Table(box=None, header_style="bold")
        for name in ("run", "epoch", "loss", "dev", "time left"):
            table.add_column(name, justify="left" if name == "run" else "right", no_wrap=True)
        at_work_first = sorted(self._runs.items(), key=lambda item: item[1].state != "training")
        for folder, run in at_work_first[:_MOST]:
            name = escape(one_line(str(folder.relative_to(self._above))))
            loss = "" if run.loss is None else f"{run.loss:.4f}"
            dev, left = escape(one_line(run.dev)), run.left or escape(one_line(run.state))
            table.add_row(name, f"{run.epoch:.2f} / {run.epochs}", loss, dev, left)
        ended = sum(run.state not in ("waiting", "training") for run in self._runs.values())
        table.caption = f"{ended} of {len(self._runs)} runs have ended"
        return table
