"""A run folder: everything about one training, to go on from, to look at, and to trust.

recipe.json         the recipe, resolved
run.json            checksums of the data; when, where, how and with which versions it was started and resumed
metrics.jsonl       one line per look: training loss, development set, heads
tensorboard/        the same for TensorBoard
checkpoints/        what a resumed training needs; see `checkpoint`
best/               once the training has ended: weights that did best on the development set
result.json         and what came out, with the SHA-256 of the answers and of metrics.jsonl
diverged.txt        or why nothing can come out: its loss, or a weight, was no finite number
test.safetensors    answers on the test set, item by item (and `dev.safetensors`, and one for each further test set)
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repulsive._version import __version__
from repulsive.errors import RunError
from repulsive.lab.engine import seals
from repulsive.lab.engine.checkpoint import Checkpoints
from repulsive.lab.engine.config import as_tables
from repulsive.lab.engine.files import read_json, told, write_bytes, write_json, write_text
from repulsive.lab.engine.recipe import Recipe
from repulsive.lab.engine.scores import check_scores
from repulsive.repulsion.model_collapse import CollapseDetector
from repulsive.safety.files import locked, open_append, refuse_link
from repulsive.safety.secrets import redact_word

RECIPE, RUN, METRICS, RESULT, LOCK = "recipe.json", "run.json", "metrics.jsonl", "result.json", ".lock"
DIVERGED = "diverged.txt"
BOARD = "tensorboard"
_RECIPE_KINDS = {"task": str, "label": str, "seed": int} | dict.fromkeys(("data", "model", "training", "method"), dict)
_FACT_KINDS = {"started": dict, "resumed": list, "data": dict}
_NO_PARTS = ("notes", seals.SHA256)  # tables of a result that are not about a part
_PACKAGES = ("torch", "accelerate", "safetensors", "triton", "numpy")


class RunFolder:
    """The folder of one run.

    Args:
        path: where it is, or shall be.
        keep: checkpoints that stay.
    """

    def __init__(self, path: Path, keep: int = 2) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path / "checkpoints", keep)
        self.best = Checkpoints(path / "best", 1)
        self._board: Any = None
        self._verified: set[str] = set()  # parts whose scores were compared with their answers
        self._warned: set[Path] = set()

    # -- what it is ---------------------------------------------------------------------------------------------

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe's tables.

        Raises:
            RunError: this is no run folder.
        """
        found = read_json(self.path / RECIPE)
        if not isinstance(found, dict):
            raise RunError(f"{self.path}: is no run folder; `repulsive ls` lists those there are")
        return _checked(found, _RECIPE_KINDS, self.path / RECIPE)

    @property
    def facts(self) -> dict[str, Any]:
        """What `run.json` says; nothing where there is none.

        Raises:
            RunError: it is damaged.
        """
        found = read_json(self.path / RUN)
        if found is not None and not isinstance(found, dict):
            raise RunError(f"{self.path / RUN}: is no table; it is no file of a run")
        return _checked(found or {}, _FACT_KINDS, self.path / RUN)

    @property
    def seed(self) -> int:
        """The recipe's.

        Raises:
            RunError: this is no run folder, or its recipe has none.
        """
        found = self.recipe
        if "seed" not in found:
            raise RunError(f"{self.path / RECIPE}: has no seed; it is no recipe of a run")
        return int(found["seed"])

    @property
    def result(self) -> dict[str, Any] | None:
        """What came out; None while the training has not ended.

        Raises:
            RunError: the file is damaged, or was changed after the training wrote it.
        """
        found = read_json(self.path / RESULT)
        if not isinstance(found, dict):
            return None
        seals.check_result(found, self.path / RESULT)
        return _checked(found, {"seconds": int | float}, self.path / RESULT)

    @property
    def diverged(self) -> bool:
        """Whether the training ended because it has no result."""
        return (self.path / DIVERGED).is_file()

    @property
    def collapsed(self) -> int | None:
        """The step from which on the model answered every input alike; None if it never did."""
        watch = CollapseDetector()
        watch.read_log(self.lines())
        return watch.step

    @property
    def remedy(self) -> str:
        """What brings back a part of the folder that is gone: a run that has a result is otherwise left as it is."""
        first = f"remove its {RESULT} and " if (self.path / RESULT).exists() else ""
        return f"{first}run the command that trained it"

    def lines(self) -> list[dict[str, Any]]:
        """All of `metrics.jsonl`; half a line at its end, from a killed process, is left out.

        Raises:
            RunError: it was changed after the training ended.
        """
        path = self.path / METRICS
        try:
            data = path.read_bytes()
        except OSError:
            return []
        seals.check_file(self.result, path, data)
        text = data.decode("utf-8", errors="replace")
        found = []
        for line in text.split("\n"):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict) and isinstance(value.get("kind"), str) and _is_number(value.get("step")):
                found.append(value)
        return found

    def curve(self, kind: str, key: str) -> list[tuple[float, float]]:
        """(step, value) pairs of a quantity in `metrics.jsonl`, such as "dev" and "accuracy"."""
        lines = (line for line in self.lines() if line["kind"] == kind and _is_number(line.get(key)))
        return [(line["step"], line[key]) for line in lines]

    def keys(self, kind: str) -> list[str]:
        """Names of what lines of a kind in `metrics.jsonl` hold, each once."""
        return list(dict.fromkeys(key for line in self.lines() if line["kind"] == kind for key in line))

    # -- writing ------------------------------------------------------------------------------------------------

    def claim(self, recipe: Recipe, checksums: Mapping[str, str], device: str) -> None:
        """Make the folder this recipe's, or find that it is; one in which no step was trained is anybody's.

        Raises:
            RunError: it belongs to another recipe, or was trained on other data, or cannot be written.
        """
        tables = as_tables(recipe)
        with told(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            for leftover in self.path.glob(".*.aside-*"):  # of a killed process; nobody else writes here
                leftover.unlink()
        known, facts = read_json(self.path / RECIPE), self.facts
        same = known is None or known == json.loads(json.dumps(tables))
        if not (self.result or self.checkpoints.found() or self.lines()):  # nothing to lose: it failed at its start
            facts = facts if same and facts.get("data") == dict(checksums) else {}
        elif not same:
            changed = ", ".join(_changes(known, tables)[:4])
            raise RunError(f"{self.path}: holds a run of another recipe ({changed}); choose another folder with --out")
        command = shlex.join(map(redact_word, sys.argv))
        now = {"at": _now(), "command": command, "device": device, "versions": versions()}
        if not facts:
            facts = {"started": now, "resumed": [], "seed": recipe.seed, "data": dict(checksums)}
        elif facts.get("data") != dict(checksums):
            raise RunError(f"{self.path}: was trained on other data than are there now; choose another --out")
        elif self.result is not None:
            return  # it is how the training went that is told, not who looked at it later
        else:
            facts["resumed"].append(now)
        write_json(self.path / RUN, facts)
        write_json(self.path / RECIPE, tables)
        with told(self.path):
            (self.path / DIVERGED).unlink(missing_ok=True)  # it is tried again

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out. The lock goes with the process, however that ends.

        Raises:
            RunError: another process is training here.
        """
        with told(self.path), ExitStack() as stack:
            self.path.mkdir(parents=True, exist_ok=True)
            for folder in (self.checkpoints.folder, self.best.folder, self.path / BOARD):
                refuse_link(folder)
            try:
                stack.enter_context(locked(self.path / LOCK))
            except BlockingIOError:
                raise RunError(f"{self.path}: another process is training here") from None
            held = stack.pop_all()
        with held:
            yield

    def rewind(self, step: int) -> None:
        """Forget lines after `step`: a resumed training writes them again."""
        kept = [line for line in self.lines() if line["step"] <= step]
        write_text(self.path / METRICS, "".join(json.dumps(line) + "\n" for line in kept))
        self._open_board(step)

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """One line of `metrics.jsonl`, and the same for TensorBoard."""
        path = self.path / METRICS
        with told(path), open_append(path) as file:
            file.write((json.dumps({"kind": kind, "step": step, **values}) + "\n").encode())
        if self._board is None:
            self._open_board(step)
        if self._board:
            with told(self.path / BOARD):
                for name, value in values.items():
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def sync(self) -> None:
        """Make the lines written so far last through a power cut, as the checkpoint that follows will."""
        with told(self.path / METRICS), open_append(self.path / METRICS) as file:
            os.fsync(file.fileno())

    def finish(self, result: Mapping[str, Any], items: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write answers item by item, then the result: whoever finds it finds the answers too."""
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
        """Write a result to which scores were added after the training."""
        write_json(self.path / RESULT, seals.resealed(result))

    def give_up(self, why: str) -> None:
        """Write that the training diverged."""
        write_text(self.path / DIVERGED, why + "\n")

    def metrics(self, part: str) -> dict[str, float]:
        """What came out on a part.

        Raises:
            RunError: the run was not evaluated on it, or its answers give other numbers.
        """
        tables = {name: x for name, x in (self.result or {}).items() if isinstance(x, dict) and name not in _NO_PARTS}
        if part not in tables:
            known = ", ".join(tables) or "nothing yet"
            raise RunError(f"{self.path}: was not evaluated on part {part!r}; it was on {known}")
        found: dict[str, float] = tables[part]
        if not all(map(_is_number, found.values())):
            raise RunError(f"{self.path / RESULT}: has something else than numbers for part {part!r}; it is damaged")
        if part not in self._verified and (self.path / f"{part}.safetensors").is_file():
            check_scores(found, self.items(part), self.path / f"{part}.safetensors")
            self._verified.add(part)
        return found

    def items(self, part: str) -> dict[str, Tensor]:
        """What `finish` wrote for a part.

        Raises:
            RunError: there is no such file, or it is damaged or was changed after the training wrote it.
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
        except Exception as error:  # of safetensors, whose errors are plain exceptions
            raise RunError(f"{path}: cannot be read ({error}); {self.remedy}") from None

    def close(self) -> None:
        """Close TensorBoard's file, if one is open."""
        board, self._board = self._board, None
        if board:
            with suppress(OSError):  # a full disk has been told of by then, and metrics.jsonl has all of it
                board.close()

    def _open_board(self, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:  # metrics.jsonl has all of it
            self._board = False
        else:
            with told(self.path / BOARD):
                self._board = SummaryWriter(str(self.path / BOARD), purge_step=step + 1)


def versions() -> dict[str, str]:
    """Of this package, Python, and what the numbers depend on."""
    found = {"repulsive": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def _changes(known: Any, wanted: Any, place: str = "") -> list[str]:
    if isinstance(known, dict) and isinstance(wanted, dict):
        keys = dict.fromkeys([*known, *wanted])
        return [c for key in keys for c in _changes(known.get(key), wanted.get(key), f"{place}.{key}".strip("."))]
    same = json.loads(json.dumps(known)) == json.loads(json.dumps(wanted))
    return [] if same else [f"{place} was {known!r}, now {wanted!r}"]


def _checked(table: dict[str, Any], kinds: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """A table whose entries, as far as they are there, are of the kinds that whoever reads it takes for granted."""
    for key, kind in kinds.items():
        if key in table and (not isinstance(table[key], kind) or isinstance(table[key], bool)):
            raise RunError(f"{path}: its {key} is {str(table[key])[:40]!r}, which cannot be; the file is damaged")
    return table


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
