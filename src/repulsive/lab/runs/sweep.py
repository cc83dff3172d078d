"""Run a sweep over a recipe and write the best settings as a recipe."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repulsive.lab.engine import sweep as sweeps
from repulsive.lab.engine.launch import train_many
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.sweep_queue import Stage, grid_points
from repulsive.lab.runs.plan import folder_name, plan
from repulsive.lab.systems.registry import make_task, open_recipe
from repulsive.terminal.document import finite
from repulsive.terminal.table import Table, three_digits


@dataclass(frozen=True)
class SweepResult:
    """Best settings of a sweep.

    Args:
        changes: `key=value` settings of the best trial.
        metric: metric of the development set by which the trial was chosen.
        value: value of the metric.
        recipe: the file with the best settings.
        trials: all trials, in the order in which they were tried.
    """

    changes: tuple[str, ...]
    metric: str
    value: float
    recipe: Path
    trials: tuple[sweeps.Trial, ...] = ()


def run_sweep(
    recipe: str,
    over: Sequence[str] = (),
    then: Sequence[str] = (),
    changes: Sequence[str] = (),
    *,
    seeds: int = 1,
    jobs: int = 0,
    out: Path | None = None,
    storage: str | None = None,
    device: str | None = None,
    progress: Callable[[str], None] = print,
) -> SweepResult:
    """Try all settings of one or two grids and write the best as `best.toml`. Call it again to resume.

    Args:
        recipe: TOML file, or name of a built-in recipe.
        over: `key=value,value,...` for each key of the first grid; if empty, the default grids of the recipe's rule.
        then: `key=value,value,...` for each key of a second grid, which starts from the best settings of the first.
        changes: `key=value` settings for all runs.
        seeds: runs per setting.
        jobs: parallel runs; 0: one per core.
        out: folder of the sweep; None: `sweeps/RECIPE`.
        storage: Optuna storage; None: an SQLite file in `out`.
        device: "cpu", "cuda" or None.
        progress: called with one line per finished trial.

    Raises:
        ConfigError: the recipe or a setting is invalid, or Optuna is missing.
        RunError: a run failed, or all settings of a grid diverged.
    """
    opened = open_recipe(recipe, changes)
    stages = [sweeps.parse_stage(words) for words in (over, then) if words] or sweeps.default_stages(opened)
    check_points(recipe, changes, stages)
    task = make_task(opened)
    name = folder_name(recipe, changes)
    folder = out or Path("sweeps") / name

    def report(trial: sweeps.Trial) -> None:
        value = f"dev {task.select_by} {trial.value:.4f}" if math.isfinite(trial.value) else "diverged"
        progress(f"{' '.join(trial.changes)}: {value}")

    with RunFolder(folder).locked():
        trials = sweeps.sweep(
            name,
            stages,
            lambda settings: plan([recipe], [*changes, *settings], seeds=seeds, out=folder / "runs", device=device),
            lambda specs: train_many(specs, make_task, jobs),
            task.select_by,
            storage or sweeps.storage_in(folder),
            checksums=task.checksums,
            place=f"{socket.gethostname()}:{folder.resolve()}",
            on_trial=report,
        )
    best = sweeps.best(trials)
    parent = str(Path(recipe).resolve()) if recipe.endswith(".toml") else recipe
    path = folder / "best.toml"
    comment = f"Best of {len(trials)} trials by {task.select_by} on the development set: {best.value:.4f}"
    sweeps.write_recipe(path, parent, [*changes, *best.changes], comment)
    return SweepResult(best.changes, task.select_by, best.value, path, tuple(trials))


def check_points(recipe: str, changes: Sequence[str], stages: Sequence[Stage]) -> None:
    """Open the recipe at every point of every grid, so that a mistake is reported before training starts.

    Points of the second grid are checked with the first point of the first one.
    """
    before: list[str] = []
    for stage in stages:
        points = [[f"{key}={value}" for key, value in point.items()] for point in grid_points(stage)]
        for point in points:
            open_recipe(recipe, [*changes, *before, *point])
        before += points[0]


def sweep_tables(result: SweepResult) -> list[Table | str]:
    """Make a table of all trials, best first, and a line that names the written recipe."""
    trials = sorted(result.trials, key=lambda trial: -trial.value)
    rows = [
        [
            str(trial.stage),
            " ".join(trial.changes),
            three_digits(trial.value) if math.isfinite(trial.value) else "diverged",
        ]
        for trial in trials
    ]
    best = f"best: {' '.join(result.changes)}, dev {result.metric} {three_digits(result.value)}"
    return [Table(["stage", "settings", f"dev {result.metric}"], rows), f"{best}; written to {result.recipe}"]


def sweep_as_json(result: SweepResult) -> dict[str, Any]:
    """Convert the result of a sweep to a dictionary for JSON; the value of a diverged trial is None."""
    return {
        "metric": result.metric,
        "best": {"changes": list(result.changes), "value": result.value, "recipe": str(result.recipe)},
        "trials": [
            {"stage": trial.stage, "changes": list(trial.changes), "value": finite(trial.value)}
            for trial in result.trials
        ],
    }
