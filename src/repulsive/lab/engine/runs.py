"""A run folder: the record of one training, from which it is resumed, inspected and verified.

recipe.json         the resolved recipe
run.json            checksums of the data and of the assets; time, command, device and versions of each start
assets/             small files that the trained model needs: vocabulary, tokenizer, class names; see `assets`
metrics.jsonl       one line per log: training loss, development set, heads
tensorboard/        the same for TensorBoard; other loggers have folders of their own names
checkpoints/        state of an unfinished training; see `checkpoint`
best/               after training: the weights that did best on the development set
result.json         after training: the metrics, with the SHA-256 of the answers and of metrics.jsonl
diverged.txt        or the reason why there is no result: a loss or a weight was not finite
test.safetensors    answers on the test set, item by item (also `dev.safetensors`, and one for each further test set)
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repulsive._version import __version__
from repulsive.errors import ConfigError, RunError
from repulsive.lab.engine import seals
from repulsive.lab.engine.checkpoint import Checkpoints
from repulsive.lab.engine.config import as_tables
from repulsive.lab.engine.files import read_json, write_bytes, write_errors, write_json, write_text
from repulsive.lab.engine.recipe import Recipe
from repulsive.lab.engine.recipe_tables import differences, flatten
from repulsive.lab.engine.scores import check_scores
from repulsive.loggers.interface import LoggedRun
from repulsive.loggers.open_loggers import Loggers, open_loggers
from repulsive.loggers.tensorboard import FOLDER as BOARD
from repulsive.loggers.tensorboard import TensorBoardLogger
from repulsive.repulsion.model_collapse import CollapseDetector
from repulsive.safety.files import locked, open_append, refuse_link
from repulsive.safety.local_paths import remote_folder
from repulsive.safety.secrets import redact_word

RECIPE, RUN, METRICS, RESULT, LOCK = "recipe.json", "run.json", "metrics.jsonl", "result.json", ".lock"
DIVERGED = "diverged.txt"
ASSETS = "assets"
_RECIPE_TYPES = {"task": str, "label": str, "seed": int} | dict.fromkeys(("data", "model", "training", "method"), dict)
_FACT_TYPES = {"started": dict, "resumed": list, "data": dict, "assets": dict}
_NOT_PARTS = ("notes", seals.SHA256)  # tables of a result that are not about a data split
_PACKAGES = ("torch", "accelerate", "safetensors", "triton", "numpy")


class RunFolder:
    """The folder of one run.

    Args:
        path: the folder, which need not exist yet.
        keep: number of checkpoints to keep.
        loggers: names of loggers besides TensorBoard; see `open_loggers`.
    """

    def __init__(self, path: Path, keep: int = 2, loggers: Sequence[str] = ()) -> None:
        self.path = path
        self._names = tuple(loggers)
        self._loggers: Loggers | None = None
        self.checkpoints = Checkpoints(path / "checkpoints", keep)
        self.best = Checkpoints(path / "best", 1)
        self._board: TensorBoardLogger | None = None
        self._verified: set[str] = set()  # data splits whose metrics were recomputed from their answers
        self._warned: set[Path] = set()

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def recipe(self) -> dict[str, Any]:
        """Read the recipe as nested tables.

        Raises:
            RunError: this is not a run folder.
        """
        tables = read_json(self.path / RECIPE)
        if not isinstance(tables, dict):
            raise RunError(f"{self.path}: is not a run folder; `repulsive ls` lists the runs")
        return _checked(tables, _RECIPE_TYPES, self.path / RECIPE)

    @property
    def facts(self) -> dict[str, Any]:
        """Read `run.json`; empty without the file.

        Raises:
            RunError: the file is damaged.
        """
        facts = read_json(self.path / RUN)
        if facts is not None and not isinstance(facts, dict):
            raise RunError(
                f"{self.path / RUN}: expected a JSON object, got {type(facts).__name__}; the file is damaged"
            )
        return _checked(facts or {}, _FACT_TYPES, self.path / RUN)

    @property
    def seed(self) -> int:
        """Read the seed of the recipe.

        Raises:
            RunError: this is not a run folder, or its recipe has no seed.
        """
        recipe = self.recipe
        if "seed" not in recipe:
            raise RunError(f"{self.path / RECIPE}: has no seed; the file is damaged")
        return int(recipe["seed"])

    @property
    def result(self) -> dict[str, Any] | None:
        """Read `result.json`; None until the training has finished.

        Raises:
            RunError: the file is damaged, or was changed after training.
        """
        result = read_json(self.path / RESULT)
        if not isinstance(result, dict):
            return None
        seals.check_result(result, self.path / RESULT)
        return _checked(result, {"seconds": int | float}, self.path / RESULT)

    @property
    def diverged(self) -> bool:
        """Whether the training ended without a result."""
        return (self.path / DIVERGED).is_file()

    @property
    def collapsed(self) -> int | None:
        """First step from which on the model gave a constant output; None if it never did."""
        watch = CollapseDetector()
        watch.read_log(self.lines())
        return watch.step

    @property
    def remedy(self) -> str:
        """Return advice on restoring a missing file; it depends on whether the run has a result."""
        first = f"remove its {RESULT} and " if (self.path / RESULT).exists() else ""
        return f"{first}run the command that trained it"

    def lines(self) -> list[dict[str, Any]]:
        """Read all lines of `metrics.jsonl`, without an incomplete last line that a killed process left.

        Raises:
            RunError: the file was changed after training.
        """
        path = self.path / METRICS
        try:
            data = path.read_bytes()
        except OSError:
            return []
        seals.check_file(self.result, path, data)
        lines = []
        for line in data.decode("utf-8", errors="replace").split("\n"):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict) and isinstance(value.get("kind"), str) and _is_number(value.get("step")):
                lines.append(value)
        return lines

    def curve(self, kind: str, key: str) -> list[tuple[float, float]]:
        """Return (step, value) pairs of a quantity in `metrics.jsonl`, such as kind "dev" and key "accuracy"."""
        lines = (line for line in self.lines() if line["kind"] == kind and _is_number(line.get(key)))
        return [(line["step"], line[key]) for line in lines]

    def keys(self, kind: str) -> list[str]:
        """List the names of the quantities in all `metrics.jsonl` lines of a kind, such as "dev"."""
        return list(dict.fromkeys(key for line in self.lines() if line["kind"] == kind for key in line))

    def assets(self) -> dict[str, bytes]:
        """Read the files of `assets/`, by name; empty for run folders of earlier versions.

        Raises:
            RunError: a file is missing, is a link, or differs from its checksum.
        """
        files = {}
        for name, checksum in self.facts.get("assets", {}).items():
            path = self.path / ASSETS / name
            if Path(name).name != name:
                raise RunError(
                    f"{self.path / RUN}: names the asset {name[:60]!r}, which is a path; the file is damaged"
                )
            try:
                refuse_link(path.parent)
                refuse_link(path)
                files[name] = path.read_bytes()
            except (OSError, ValueError) as error:
                raise RunError(f"{path}: cannot be read ({error}); {self.remedy}") from None
            if seals.digest(files[name]) != checksum:
                raise RunError(f"{path}: was changed after the training wrote it (its checksum differs); {self.remedy}")
        return files

    # -- writing ------------------------------------------------------------------------------------------------

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
            for leftover in self.path.glob(".*.aside-*"):  # left by a killed process; we hold the lock
                leftover.unlink()
        existing, facts = read_json(self.path / RECIPE), self.facts
        changed = [] if existing is None else differences(existing, tables, ignore=["training.checkpoint"])
        if not (self.result or self.checkpoints.found() or self.lines()):  # the run failed at its start
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
        facts["assets"] = {name: seals.digest(content) for name, content in (assets or {}).items()}
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
            sums[f"{part}.safetensors"] = seals.digest(data)
        if (self.path / METRICS).is_file():
            sums[METRICS] = seals.digest((self.path / METRICS).read_bytes())
        write_json(self.path / RESULT, seals.sealed(result, sums))
        self.close()

    def add_scores(self, result: Mapping[str, Any]) -> None:
        """Replace the result by a result with more scores, which were computed after training."""
        write_json(self.path / RESULT, seals.resealed(result))

    def give_up(self, why: str) -> None:
        """Record that the training diverged."""
        write_text(self.path / DIVERGED, why + "\n")

    def metrics(self, part: str) -> dict[str, float]:
        """Return the metrics on a data split.

        Raises:
            RunError: the run was not evaluated on this split, or its stored answers give other numbers.
        """
        tables = {name: x for name, x in (self.result or {}).items() if isinstance(x, dict) and name not in _NOT_PARTS}
        if part not in tables:
            evaluated = ", ".join(tables) or "nothing yet"
            raise RunError(f"{self.path}: was not evaluated on part {part!r}; it was on {evaluated}")
        metrics: dict[str, float] = tables[part]
        if not all(map(_is_number, metrics.values())):
            raise RunError(f"{self.path / RESULT}: expected numbers for part {part!r}, got other values; it is damaged")
        if part not in self._verified and (self.path / f"{part}.safetensors").is_file():
            check_scores(metrics, self.items(part), self.path / f"{part}.safetensors")
            self._verified.add(part)
        return metrics

    def items(self, part: str) -> dict[str, Tensor]:
        """Read the answers on a data split, as `finish` wrote them.

        Raises:
            RunError: the file is missing or damaged, or was changed after training.
        """
        from safetensors.torch import load

        path = self.path / f"{part}.safetensors"
        if not path.is_file():
            raise RunError(f"{self.path}: has no answers on {part} yet; {self.remedy}")
        try:
            data = path.read_bytes()
        except OSError as error:
            raise RunError(f"{path}: cannot be read ({error.strerror}); {self.remedy}") from None
        if not seals.check_file(self.result, path, data) and path not in self._warned:
            self._warned.add(path)
            seals.warn_unsealed(path)
        try:
            return load(data)
        except Exception as error:  # safetensors raises plain exceptions
            raise RunError(f"{path}: cannot be read ({error}); {self.remedy}") from None

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
    found = {"repulsive": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def _checked(table: dict[str, Any], types: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Raise `RunError` if an entry of a table has an unexpected type; missing entries are accepted."""
    for key, kind in types.items():
        if key in table and (not isinstance(table[key], kind) or isinstance(table[key], bool)):
            raise RunError(f"{path}: its {key} is {str(table[key])[:40]!r}, which cannot be; the file is damaged")
    return table


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
