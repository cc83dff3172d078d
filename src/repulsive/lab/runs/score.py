"""Trained weights on a part of the data, again or on other data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from repulsive.errors import ConfigError, RunError
from repulsive.lab.engine.processes import chosen_device
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.tables import Row, finished_in, label_of, table
from repulsive.lab.engine.task import Evaluation, Task
from repulsive.lab.systems.registry import from_tables, make_task
from repulsive.lab.text.folders import read_manifest
from repulsive.lab.text.prepared import part_names


def score(folders: Sequence[Path], part: str, data: Path | None = None, device: str | None = None) -> list[Row]:
    """Evaluate the best weights of finished runs; the first folder's are the baseline.

    Args:
        folders: of runs, each with one or more seeds.
        part: "test", "dev", "train" or a further test set.
        data: another prepared folder than they were trained on; its vocabulary and classes must be the same.
        device: "cpu", "cuda" or None for what is there.

    Raises:
        ConfigError: the data have no such part.
        DataError: the data are not there.
        RunError: a folder holds no finished run, or the data do not fit its weights.
    """
    place = chosen_device(device)
    found = [(folder, finished_in(folder)) for folder in folders]
    for run in (run for _, runs in found for run in runs.values()):
        _check_part(part, data or _folder(run))  # all before the first: evaluating takes long
    entries = []
    for folder, runs in found:
        answers = {seed: evaluate(run, part, data, place) for seed, run in runs.items()}
        entries.append((label_of(folder, runs), folder, answers))
    return table(entries)


def _check_part(part: str, data: Path) -> None:
    known = part_names(read_manifest(data)["files"])
    if part not in known:
        raise ConfigError(f"part {part!r}: {data} has none of this name; choose one of {', '.join(known)}")


def _folder(run: RunFolder) -> Path:
    found: Path = from_tables(run.recipe, str(run.path)).data.folder  # type: ignore[attr-defined]
    return found


def evaluate(run: RunFolder, part: str, data: Path | None, device: torch.device) -> Evaluation:
    """One run's best weights on a part of its own data, or of others."""
    task, model = load_run(run, device, data)
    with torch.inference_mode():
        return task.evaluate(model, part)


def load_run(run: RunFolder, device: torch.device, data: Path | None = None) -> tuple[Task, nn.Module]:
    """The task of a finished run, and its model with the best weights, ready to evaluate.

    Raises:
        RunError: there are no weights, or they do not fit the data.
    """
    recipe = from_tables(run.recipe, str(run.path))
    if data is not None:
        recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, folder=data))  # type: ignore[attr-defined,call-arg]
    weights = run.best.latest()
    if weights is None:
        raise RunError(f"{run.path}: has no weights in best/; {run.remedy}")
    task = make_task(recipe)
    task.to(device)
    try:
        model = task.model().to(device).eval()
        model.load_state_dict(weights[1]["model"])
    except (RuntimeError, TypeError, KeyError, AttributeError) as error:
        reason = (str(error).splitlines() or [""])[-1].strip()
        raise RunError(f"{run.path}: its weights do not fit {data or recipe.task} ({reason})") from None
    return task, model
