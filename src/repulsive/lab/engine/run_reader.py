"""Read a run folder: recipe, logs, result and answers, verified against their checksums.

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from repulsive.errors import RunError, is_number
from repulsive.lab.engine import result_checksums
from repulsive.lab.engine.files import read_json
from repulsive.lab.engine.scores import check_scores
from repulsive.repulsion.model_collapse import CollapseDetector
from repulsive.safety.files import refuse_link

RECIPE, RUN, METRICS, RESULT = "recipe.json", "run.json", "metrics.jsonl", "result.json"
DIVERGED = "diverged.txt"
ASSETS = "assets"
_RECIPE_TYPES = {"task": str, "label": str, "seed": int} | dict.fromkeys(("data", "model", "training", "method"), dict)
_FACT_TYPES = {"started": dict, "resumed": list, "data": dict, "assets": dict}
_NOT_PARTS = ("notes", result_checksums.SHA256)  # tables of a result that are not about a data split


class RunReader:
    """The files of one run, for reading.

    Args:
        path: the folder, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._verified: set[str] = set()  # data splits whose metrics were recomputed from their answers
        self._warned: set[Path] = set()

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
        result_checksums.check_result(result, self.path / RESULT)
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
        result_checksums.check_file(self.result, path, data)
        lines = []
        for line in data.decode("utf-8", errors="replace").split("\n"):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict) and isinstance(value.get("kind"), str) and is_number(value.get("step")):
                lines.append(value)
        return lines

    def curve(self, kind: str, key: str) -> list[tuple[float, float]]:
        """Return (step, value) pairs of a quantity in `metrics.jsonl`, such as kind "dev" and key "accuracy"."""
        lines = (line for line in self.lines() if line["kind"] == kind and is_number(line.get(key)))
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
            if result_checksums.digest(files[name]) != checksum:
                raise RunError(f"{path}: was changed after the training wrote it (its checksum differs); {self.remedy}")
        return files

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
        if not all(map(is_number, metrics.values())):
            raise RunError(f"{self.path / RESULT}: expected numbers for part {part!r}, got other values; it is damaged")
        if part not in self._verified and (self.path / f"{part}.safetensors").is_file():
            check_scores(metrics, self.items(part), self.path / f"{part}.safetensors")
            self._verified.add(part)
        return metrics

    def items(self, part: str) -> dict[str, Tensor]:
        """Read the answers on a data split, as `RunFolder.finish` wrote them.

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
        if not result_checksums.check_file(self.result, path, data) and path not in self._warned:
            self._warned.add(path)
            result_checksums.warn_unverified(path)
        try:
            return load(data)
        except Exception as error:  # safetensors raises plain exceptions
            raise RunError(f"{path}: cannot be read ({error}); {self.remedy}") from None


def _checked(table: dict[str, Any], types: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Raise `RunError` if an entry of a table has an unexpected type; missing entries are accepted."""
    for key, kind in types.items():
        if key in table and (not isinstance(table[key], kind) or isinstance(table[key], bool)):
            raise RunError(f"{path}: its {key} is {str(table[key])[:40]!r}, which cannot be; the file is damaged")
    return table
