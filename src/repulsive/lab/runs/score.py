"""Load trained runs, and evaluate them again or on other data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from repulsive.errors import ConfigError, RepulsiveError, RunError, short_message
from repulsive.lab.engine.assets import DATA, EXAMPLES
from repulsive.lab.engine.processes import chosen_device
from repulsive.lab.engine.run_reader import ASSETS
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.tables import Row, finished_in, label_of, runs_in, table
from repulsive.lab.engine.task import Evaluation, Task
from repulsive.lab.systems.registry import from_tables, make_task, restore_task
from repulsive.lab.text.folders import read_manifest
from repulsive.lab.text.prepared import part_names


def score(folders: Sequence[Path], part: str, data: Path | None = None, device: str | None = None) -> list[Row]:
    """Evaluate the best weights of finished runs; the first folder is the baseline.

    Args:
        folders: folders of runs, each with one or more seeds.
        part: data split: "test", "dev", "train" or a further test set.
        data: a prepared folder to use instead of the runs' own; it must have the same vocabulary and classes.
        device: "cpu", "cuda" or None for the default.

    Raises:
        ConfigError: the data have no such split.
        DataError: the data are damaged.
        RunError: a folder holds no finished run, its own data are missing, or the data do not fit its weights.
    """
    place = chosen_device(device)
    finished = [(folder, finished_in(folder)) for folder in folders]
    for run in (run for _, runs in finished for run in runs.values()):
        _check_part(run, part, data)  # check all runs before the first evaluation, which takes long
    entries = []
    for folder, runs in finished:
        answers = {seed: evaluate(run, part, data, place) for seed, run in runs.items()}
        entries.append((label_of(folder, runs), folder, answers))
    return table(entries)


def evaluate(run: RunFolder, part: str, data: Path | None, device: torch.device) -> Evaluation:
    """Evaluate the best weights of a run on a split of its own data, or of other data."""
    task, model = load_run(run, device, data)
    with torch.inference_mode():
        return task.evaluate(model, part)


def only_run(folder: Path) -> RunFolder:
    """Return the only run in a folder.

    Raises:
        RunError: the folder holds no run, or several seeds.
    """
    runs = runs_in(folder)
    if len(runs) != 1:
        problem = f"has seeds {', '.join(map(str, runs))}: name one of their folders" if runs else "is not a run folder"
        raise RunError(f"{folder}: {problem}; `repulsive ls` lists runs")
    (run,) = runs.values()
    return run


def load_run(run: RunFolder, device: torch.device, data: Path | None = None) -> tuple[Task, nn.Module]:
    """Load the task of a finished run with its data, and the model with the best weights, in evaluation mode.

    Args:
        run: folder of the run.
        device: device to which data and model are moved.
        data: a prepared folder to use instead of the run's own.

    Raises:
        DataError: the data are missing or damaged.
        RunError: the weights are missing, or do not fit the data.
    """
    recipe = from_tables(run.recipe, str(run.path))
    if data is not None:
        recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, folder=data))  # type: ignore[attr-defined,call-arg]
    task = make_task(recipe)
    if data is not None:
        _check_vocabulary(run, task, data)
    return task, _load_model(run, task, device, data)


def load_trained(run: RunFolder, device: torch.device) -> tuple[Task, nn.Module]:
    """Load the task of a finished run without its data, and the model with the best weights, in evaluation mode.

    Run folders of earlier versions have no assets: for them the prepared data are opened.

    Raises:
        DataError: the run has no assets, and its data are missing or damaged.
        RunError: weights or assets are missing or damaged.
    """
    task = open_trained(run)
    return task, _load_model(run, task, device)


def open_trained(run: RunFolder) -> Task:
    """Load the task of a run without its data; see `load_trained`."""
    recipe, assets = from_tables(run.recipe, str(run.path)), run.assets()
    if not assets:
        return make_task(recipe)
    try:
        return restore_task(recipe, assets)
    except RepulsiveError:
        raise
    except Exception as error:  # checksums are right, but the content is not that of a training
        reason = short_message(error)
        raise RunError(f"{run.path / ASSETS}: cannot be read ({reason}); {run.remedy}") from None


def data_folder(run: RunFolder) -> Path | None:
    """Return the prepared folder that a run was trained on; None if its recipe does not name a folder."""
    tables: dict[str, Any] = run.recipe.get("data", {})
    return Path(tables["folder"]) if isinstance(tables.get("folder"), str) else None


def _check_part(run: RunFolder, part: str, data: Path | None) -> None:
    folder = data or data_folder(run)
    if folder is None:
        return
    if data is None and not folder.exists():
        raise RunError(
            f"{run.path}: evaluating its own part {part!r} needs its prepared data, and {folder} does not exist; "
            "prepare them there again, or name other data with --data"
        )
    parts = part_names(read_manifest(folder)["files"])
    if part not in parts:
        raise ConfigError(f"part {part!r}: {folder} has none of this name; choose one of {', '.join(parts)}")


def _check_vocabulary(run: RunFolder, task: Task, data: Path) -> None:
    """Check that other data have the vocabulary and the tokenizer that the run was trained with."""
    own, other = run.assets(), task.assets()
    for name in own.keys() - {DATA, EXAMPLES}:
        if own[name] != other.get(name):
            raise RunError(
                f"{data}: its {name} differs from that of {run.path}; evaluate on data with the same vocabulary"
            )


def _load_model(run: RunFolder, task: Task, device: torch.device, data: Path | None = None) -> nn.Module:
    weights = run.best.latest()
    if weights is None:
        raise RunError(f"{run.path}: has no weights in best/; {run.remedy}")
    task.to(device)
    try:
        model = task.model().to(device).eval()
        model.load_state_dict(weights[1]["model"])
    except (RuntimeError, TypeError, KeyError, AttributeError) as error:
        reason = (str(error).splitlines() or [""])[-1].strip()
        raise RunError(f"{run.path}: its weights do not fit {data or run.recipe['task']} ({reason})") from None
    return model
