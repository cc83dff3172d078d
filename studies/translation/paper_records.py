"""Records of the runs of `paper_settings`, small enough to commit: curves, scores, and answers sentence by sentence.

FOLDER/runs.json.xz   one entry for each row and seed: settings, machine, curves over training, scores
FOLDER/answers.npz    the answers of each entry: BLEU statistics, NLL and correct pieces of every sentence
"""

from __future__ import annotations

import json
import lzma
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from studies.translation.equal_epochs import STOPPED
from torch import Tensor

from repulsive.errors import RunError
from repulsive.lab.engine.config import as_tables
from repulsive.lab.engine.files import read_json, write_bytes
from repulsive.lab.engine.recipe import Recipe
from repulsive.lab.engine.recipe_tables import flatten
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.task import Evaluation

RUNS, ANSWERS = "runs.json.xz", "answers.npz"
ITEMS = ("bleu_statistics", "nll", "correct")
CURVES = {"dev": None, "heads": ("ratio", "drive", "repulsion")}  # kind of log line -> its metrics; None: all
_SHARED = ("model.", "optimizer.", "training.batch", "training.epochs", "training.precision")  # settings of all rows
Key = tuple[str, int]  # row, seed


class Records:
    """Records in a folder; a run with more epochs replaces one with fewer.

    Args:
        folder: of the two files, which need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: dict[Key, dict[str, Any]] = {}
        self._answers: dict[str, np.ndarray] = {}
        if (folder / RUNS).is_file():
            stored = json.loads(lzma.decompress((folder / RUNS).read_bytes()))
            self.runs = {(run["row"], run["seed"]): run for run in stored}
        if (folder / ANSWERS).is_file():
            with np.load(folder / ANSWERS, allow_pickle=False) as file:
                self._answers = dict(file.items())

    def is_complete(self, key: Key, until: int | None = None) -> bool:
        """Whether a run was trained to its end, diverged, or has done `until` epochs."""
        run = self.runs.get(key)
        return run is not None and (run["complete"] or (until is not None and run["epochs"] >= until))

    def evaluation(self, key: Key, part: str) -> Evaluation:
        """Return scores and answers of a run."""
        names = {name: f"{key[0]}/{key[1]}/{part}/{name}" for name in ITEMS} | {"labels": f"labels/{part}"}
        items = {name: torch.from_numpy(self._answers[x]) for name, x in names.items() if x in self._answers}
        return Evaluation(self.runs[key]["parts"][part], items)

    def check_settings(self, recipes: Iterable[Recipe]) -> None:
        """Check that runs to train have the model and the training of those in the records.

        Raises:
            RunError: a setting that all rows share differs.
        """
        if not self.runs:
            return
        first = next(iter(self.runs.values()))["settings"]  # all runs agree in these settings
        shared = {name: value for name, value in first.items() if name.startswith(_SHARED)}
        for settings in (flatten(as_tables(recipe)) for recipe in recipes):
            if other := [name for name, value in shared.items() if settings.get(name, value) != value]:
                name = other[0]
                raise RunError(
                    f"{self.folder}: runs there have {name}={shared[name]}, not {settings[name]}; choose another "
                    "--records"
                )

    def collect(self, folders: Mapping[Key, Path]) -> None:
        """Add all runs that have answers, or diverged, and write the files.

        Args:
            folders: row and seed -> folder of the run.

        Raises:
            RunError: a run was trained on other data than the records.
        """
        changed = False
        for key, folder in folders.items():
            found = _read(RunFolder(folder))
            if found is None:
                continue
            run, parts = found
            self._check_data(run, folder)
            old = self.runs.get(key)
            if old is not None and (old["complete"], old["epochs"]) >= (run["complete"], run["epochs"]):
                continue
            self.runs[key] = {"row": key[0], "seed": key[1], **run}
            for part, items in parts.items():
                stored = {f"{key[0]}/{key[1]}/{part}/{name}": items[name] for name in ITEMS if name in items}
                stored[f"labels/{part}"] = items["labels"]
                self._answers |= {name: _small(tensor) for name, tensor in stored.items()}
            changed = True
        if changed:
            self._write()

    def _check_data(self, run: Mapping[str, Any], folder: Path) -> None:
        for other in self.runs.values():
            if other["data"] != run["data"]:
                raise RunError(f"{folder}: was trained on other data than {self.folder}; choose another --records")

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps([self.runs[key] for key in sorted(self.runs)])
        write_bytes(self.folder / RUNS, lzma.compress(text.encode()))
        temporary = self.folder / f".{ANSWERS}"
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_LZMA) as file:
            for name, array in self._answers.items():
                with file.open(f"{name}.npy", "w") as entry:
                    np.lib.format.write_array(entry, array)
        temporary.replace(self.folder / ANSWERS)


def _read(run: RunFolder) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]] | None:
    """Read the record of a run and its answers by data split; None if it has none."""
    from safetensors.torch import load_file

    if not (run.path / "recipe.json").is_file():
        return None
    result, stopped, answers = run.result, read_json(run.path / STOPPED), dict[str, dict[str, Tensor]]()
    epochs = run.recipe["training"]["epochs"]
    if result is not None:
        scores = {part: run.metrics(part) for part in ("dev", "test")}
        answers = {part: run.items(part) for part in scores}
    elif stopped is not None:
        epochs, scores = stopped["epochs"], {part: stopped["parts"][part] for part in ("dev", "test")}
        answers = {part: load_file(run.path / f"{part}.stopped.safetensors") for part in scores}
    elif run.diverged:
        epochs, scores = 0, {}
    else:
        return None
    started = run.facts["started"]
    record = {
        "epochs": epochs,
        "complete": result is not None or run.diverged,
        "diverged": run.diverged,
        "averaged": (result or {}).get("averaged", 0),
        "parts": scores,
        "curves": _curves(run.lines(), epochs),
        "settings": {key: x for key, x in flatten(run.recipe).items() if key != "data.folder"},
        "data": run.facts["data"],
        "device": started["device"],
        "versions": started["versions"],
    }
    return record, answers


def _curves(lines: Iterable[Mapping[str, Any]], epochs: int) -> dict[str, list[tuple[int, float]]]:
    """Collect metric -> (step, value) at the end of every epoch; of heads, the last values before it."""
    curves: dict[str, list[tuple[int, float]]] = {}
    latest: dict[str, float] = {}
    count = 0
    for line in lines:
        chosen = CURVES.get(line["kind"], ())
        values = {name: x for name, x in line.items() if chosen is None or name in chosen}
        if line["kind"] == "heads":
            latest = values
        elif line["kind"] == "dev" and count < epochs:
            count += 1
            for name, value in (values | latest).items():
                if name not in ("kind", "step"):
                    curves.setdefault(name, []).append((line["step"], float(f"{value:.6g}")))
    return curves


def _small(tensor: Tensor) -> np.ndarray:
    """Store counts in 16 bits and other numbers in 32."""
    return tensor.to(torch.float32 if tensor.is_floating_point() else torch.int16).numpy()
