"""A run folder: the record of one training, from which it is resumed. `run_reader` lists its files."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from repulsive.environment.versions import package_versions
from repulsive.errors import ConfigError, RunError
from repulsive.lab.engine import result_checksums
from repulsive.lab.engine.checkpoint import Checkpoints
from repulsive.lab.engine.config import as_tables
from repulsive.lab.engine.files import read_json, write_bytes, write_errors, write_json, write_text
from repulsive.lab.engine.recipe import Recipe
from repulsive.lab.engine.recipe_tables import differences, flatten
from repulsive.lab.engine.run_reader import ASSETS, DIVERGED, METRICS, RECIPE, RESULT, RUN, RunReader
from repulsive.loggers.interface import LoggedRun
from repulsive.loggers.open_loggers import Loggers, open_loggers
from repulsive.loggers.tensorboard import FOLDER as BOARD
from repulsive.loggers.tensorboard import TensorBoardLogger
from repulsive.safety.files import locked, open_append, refuse_link
from repulsive.safety.local_paths import remote_folder
from repulsive.safety.secrets import redact_word

LOCK = ".lock"
_PACKAGES = ("torch", "accelerate", "safetensors", "triton", "numpy")


class RunFolder(RunReader):
    """The folder of one run, for reading and writing.

    Args:
        path: the folder, which need not exist yet.
        keep: number of checkpoints to keep.
        loggers: names of loggers besides TensorBoard; see `open_loggers`.
    """

    def __init__(self, path: Path, keep: int = 2, loggers: Sequence[str] = ()) -> None:
        super().__init__(path)
        self._names = tuple(loggers)
        self._loggers: Loggers | None = None
        self.checkpoints = Checkpoints(path / "checkpoints", keep)
        self.best = Checkpoints(path / "best", 1)
        self._board: TensorBoardLogger | None = None

    def claim(
        self, recipe: Recipe, checksums: Mapping[str, str], device: str, assets: Mapping[str, bytes] | None = None
    ) -> None:
        """Start or resume a run in this folder. Another recipe may take over a folder in which no step was trained.

        Args:
            recipe: recipe of the run.
            checksums: data file -> SHA-256.
            device: description of the device.
            assets: file name -> content, to copy into the folder.

        Raises:
            RunError: the folder belongs to another recipe, or was trained on other data, or cannot be written.
        """
        tables = as_tables(recipe)
        with write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(self.path)
        existing, facts = read_json(self.path / RECIPE), self.facts
        changed = [] if existing is None else differences(existing, tables, ignore=["training.checkpoint"])
        if not (self.result or self.checkpoints.paths() or self.lines()):  # the run failed at its start
            facts = facts if not changed and facts.get("data") == dict(checksums) else {}
        elif changed:
            old, new = flatten(existing), flatten(tables)
            shown = ", ".join(f"{key} was {old.get(key)!r}, now {new.get(key)!r}" for key in changed[:4])
            raise RunError(f"{self.path}: holds a run of another recipe ({shown}); choose another folder with --out")
        command = shlex.join(map(redact_word, sys.argv))
        now = {"at": _now(), "command": command, "device": device, "versions": versions()}
        if not facts:
            facts = {"started": now, "resumed": [], "seed": recipe.seed, "data": dict(checksums)}
        elif facts.get("data") != dict(checksums):
            raise RunError(f"{self.path}: was trained on other data than are there now; choose another --out")
        elif self.result is not None:
            return  # run.json records starts of the training; here no training starts
        else:
            facts["resumed"].append(now)
        self._write_assets(assets or {})
        facts["assets"] = {name: result_checksums.digest(content) for name, content in (assets or {}).items()}
        write_json(self.path / RUN, facts)
        write_json(self.path / RECIPE, tables)
        with write_errors(self.path):
            (self.path / DIVERGED).unlink(missing_ok=True)  # this start is another attempt

    def _write_assets(self, assets: Mapping[str, bytes]) -> None:
        folder = self.path / ASSETS
        if assets:
            with write_errors(folder):
                refuse_link(folder)
                folder.mkdir(exist_ok=True)
                _remove_leftovers(folder)
        for name, content in assets.items():
            write_bytes(folder / name, content)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other processes within a block. The lock ends with the process.

        Raises:
            RunError: another process is training here, or the path was made from a URL.
        """
        if problem := remote_folder(self.path):
            raise RunError(problem)
        with write_errors(self.path), ExitStack() as stack:
            self.path.mkdir(parents=True, exist_ok=True)
            own = (self.path / name for name in (BOARD, ASSETS, *self._names))
            for folder in (self.checkpoints.folder, self.best.folder, *own):
                refuse_link(folder)
            try:
                stack.enter_context(locked(self.path / LOCK))
            except BlockingIOError:
                raise RunError(f"{self.path}: another process is training here") from None
            held = stack.pop_all()
        with held:
            yield

    def rewind(self, step: int) -> None:
        """Drop lines of `metrics.jsonl` after `step`, which a resumed training writes again."""
        kept = [line for line in self.lines() if line["step"] <= step]
        write_text(self.path / METRICS, "".join(json.dumps(line) + "\n" for line in kept))
        self._open_loggers(step)

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Append a line to `metrics.jsonl`, and log the same values."""
        path = self.path / METRICS
        with write_errors(path), open_append(path) as file:
            file.write((json.dumps({"kind": kind, "step": step, **values}) + "\n").encode())
        if self._loggers is None:
            self._open_loggers(step)
        assert self._loggers is not None
        named = {f"{kind}/{name}": value for name, value in values.items()}
        if self._board is not None:
            with write_errors(self.path / BOARD):
                self._board.log(named, step)
        self._loggers.log(named, step)

    def sync(self) -> None:
        """Flush `metrics.jsonl` to the disk, so that it is never older than the checkpoint that follows."""
        with write_errors(self.path / METRICS), open_append(self.path / METRICS) as file:
            os.fsync(file.fileno())

    def finish(self, result: Mapping[str, Any], items: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write the answers item by item, then the result: a folder with a result is complete."""
        from safetensors.torch import save

        sums = {}
        for part, tensors in items.items():
            data = save({name: x.detach().cpu().contiguous() for name, x in tensors.items()})
            write_bytes(self.path / f"{part}.safetensors", data)
            sums[f"{part}.safetensors"] = result_checksums.digest(data)
        if (self.path / METRICS).is_file():
            sums[METRICS] = result_checksums.digest((self.path / METRICS).read_bytes())
        write_json(self.path / RESULT, result_checksums.with_checksums(result, sums))
        self.close()

    def add_scores(self, result: Mapping[str, Any]) -> None:
        """Replace the result by a result with more scores, which were computed after training."""
        write_json(self.path / RESULT, result_checksums.with_new_checksum(result))

    def record_divergence(self, why: str) -> None:
        """Record that the training diverged."""
        write_text(self.path / DIVERGED, why + "\n")

    def close(self) -> None:
        """Finish all loggers that are open."""
        board, loggers, self._board, self._loggers = self._board, self._loggers, None, None
        for each in (board, loggers):
            if each is not None:
                each.finish()

    def _open_loggers(self, step: int) -> None:
        self.close()
        name = "/".join(self.path.resolve().parts[-3:])  # dataset, method and seed
        run = LoggedRun(self.path, name, flatten(read_json(self.path / RECIPE) or {}), step)
        self._loggers = open_loggers([name for name in self._names if name != BOARD], run)
        with write_errors(self.path / BOARD), suppress(ConfigError):  # not installed: metrics.jsonl has the same values
            self._board = TensorBoardLogger(run)


def versions() -> dict[str, str]:
    """Return the versions of this package, of Python, and of packages that affect the results."""
    return package_versions(_PACKAGES)


def _remove_leftovers(folder: Path) -> None:
    """Remove unfinished files that a killed process left. The caller holds the lock of the run."""
    for leftover in folder.glob(".*.aside-*"):
        leftover.unlink()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
