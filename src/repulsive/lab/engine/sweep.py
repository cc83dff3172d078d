"""Choose settings on the validation set, stage by stage, as the paper does: epsilon and alpha, then beta.

Trials are kept in an Optuna storage, so a sweep can be stopped and resumed, shared by several machines, and inspected
with Optuna's own tools. Test sets are not used.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from repulsive.errors import ConfigError, RunError
from repulsive.lab.engine import sweep_queue
from repulsive.lab.engine.config import as_tables
from repulsive.lab.engine.files import write_errors, write_text
from repulsive.lab.engine.launch import Spec
from repulsive.lab.engine.recipe import Recipe
from repulsive.lab.engine.recipe_tables import flatten, parse_value
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.sweep_queue import Stage
from repulsive.safety.files import refuse_link

DATABASE = "optuna.db"
_COMMA = re.compile(r",(?![^\[]*\])")  # a comma that is not inside brackets
Train = Callable[[Sequence[Spec]], None]
Plan = Callable[[Sequence[str]], list[Spec]]  # key=value changes -> the runs of a trial, one for every seed

DEFAULTS: dict[str, list[dict[str, list[str]]]] = {  # grids by the recipe's rule
    "none": [{"optimizer.lr": ["0.0003", "0.001", "0.003"], "model.dropout": ["0.1", "0.3", "0.5"]}],
    "sgld": [{"method.stepsize": ["0.1", "1.0"], "method.temperature": ["1e-10", "1e-8", "1e-6"]}],
    "svgd": [{"method.stepsize": ["0.01", "0.1", "1.0"], "method.alpha": ["0.001", "0.01", "0.1", "1.0"]}],
    "cosine": [{"method.stepsize": ["0.1", "1.0"], "method.alpha": ["0.001", "0.01", "0.1"]}],
}
DEFAULTS["kernel-free"] = DEFAULTS["svgd"]
DEFAULTS["spos"] = [*DEFAULTS["svgd"], {"method.beta": ["100.0", "1000.0", "10000.0", "100000.0"]}]


@dataclass(frozen=True)
class Trial:
    """A point of a grid and its score.

    Args:
        changes: `key=value`, including those chosen in earlier stages.
        value: score on the validation set, averaged over seeds; minus infinity if a seed diverged.
        stage: number of the stage, from 1.
    """

    changes: tuple[str, ...]
    value: float
    stage: int


def default_stages(recipe: Recipe) -> list[Stage]:
    """Return the grids of the recipe's rule, without settings that its task does not have, such as a dropout."""
    known = flatten(as_tables(recipe))
    stages = DEFAULTS[recipe.method.rule]
    return [{key: values for key, values in stage.items() if key in known} for stage in stages]


def parse_stage(words: Sequence[str]) -> dict[str, list[str]]:
    """Parse `["method.alpha=0.1,1", ...]` as a grid.

    Raises:
        ConfigError: a word is not `key=value,value`, or a key is given twice.
    """
    grid: dict[str, list[str]] = {}
    for word in words:
        key, equals, text = word.partition("=")
        values = _COMMA.split(text)
        if not equals or not key.strip() or not all(value.strip() for value in values):
            raise ConfigError(f"{word!r}: write it as key=value,value,..., such as method.alpha=0.01,0.1,1.0")
        if key.strip() in grid:
            raise ConfigError(f"{key.strip()} is given twice; write its values as {key.strip()}=value,value,...")
        grid[key.strip()] = [value.strip() for value in values]
    return grid


def sweep(
    name: str,
    stages: Sequence[Stage],
    plan: Plan,
    train: Train,
    metric: str,
    storage: str,
    *,
    place: str = "",
    checksums: Mapping[str, str] | None = None,
    at_once: int = 8,
    on_trial: Callable[[Trial], None] | None = None,
) -> list[Trial]:
    """Try every point of every stage; each stage starts from the best point of the stage before.

    Each combination of grid, settings, seeds and data is a study of its own, so results of other settings are not
    reused.

    Args:
        name: name of the study in the storage.
        stages: the grids.
        plan: `key=value` changes -> the runs of a trial.
        train: function that trains runs side by side.
        metric: metric of the validation set; higher is better.
        storage: an Optuna storage, such as "sqlite:///sweep.db".
        place: identifies the machine and folder of this sweep. Unfinished trials of the same place belong to a process
            that died, and are tried again.
        checksums: SHA-256 of the data files.
        at_once: number of trials whose runs are passed to `train` together.
        on_trial: called with every trial when it ends.

    Returns:
        All trials, including those of earlier calls, stage by stage in the order of the grid. `best(trials)` is the
        result.

    Raises:
        ConfigError: Optuna is not installed, or the storage cannot be opened.
        RunError: all remaining trials are running elsewhere, a run failed, or all points diverged.
    """
    chosen: tuple[str, ...] = ()
    all_trials: list[Trial] = []
    for number, stage in enumerate(stages, 1):
        study = sweep_queue.open_study(f"{name}/{number}/{_digest(stage, plan(chosen), checksums or {})}", storage)
        study.set_user_attr("metric", metric)
        study.set_user_attr("fixed", list(chosen))
        sweep_queue.enqueue(study, stage, place)
        while batch := sweep_queue.take(study, stage, at_once, place):
            runs = {trial.number: plan([*chosen, *_changes(trial.params)]) for trial in batch}
            _train([spec for specs in runs.values() for spec in specs], train)
            for trial in batch:
                value = _mean_score(runs[trial.number], metric)
                study.tell(trial, value)
                if on_trial is not None:
                    on_trial(Trial((*chosen, *_changes(trial.params)), value, number))
        sweep_queue.check_all_ended(study)
        ended = sweep_queue.ended_trials(study, stage)
        trials = [Trial((*chosen, *_changes(t.params)), float(t.value or 0), number) for t in ended]
        all_trials += trials
        top = best(trials)
        chosen = top.changes
        if top.value == -math.inf:
            raise RunError(f"stage {number}: training diverged at all {len(trials)} points; try smaller learning rates")
    return all_trials


def best(trials: Sequence[Trial]) -> Trial:
    """Return the best trial of the last stage; of equally good trials, the first in the order of the grid."""
    last = max(trial.stage for trial in trials)
    return max((trial for trial in trials if trial.stage == last), key=lambda trial: trial.value)


def storage_in(folder: Path) -> str:
    """Return the address of the SQLite storage in a sweep's folder.

    Raises:
        RunError: the file is a link, which SQLite would follow.
    """
    with write_errors(folder):
        refuse_link(folder / DATABASE)
    return f"sqlite:///{(folder / DATABASE).resolve()}"


def write_recipe(path: Path, parent: str, changes: Sequence[str], comment: str) -> None:
    """Write a recipe that extends `parent` by the chosen settings.

    Args:
        path: file to write.
        parent: recipe that the new recipe extends.
        changes: `key=value` settings; if a key occurs twice, the last one counts.
        comment: first line of the file.
    """
    tables: dict[str, list[str]] = {}
    last_values = {key.strip(): value for key, _, value in (change.partition("=") for change in changes)}
    for key, value in last_values.items():
        table, _, last = key.rpartition(".")
        parsed = parse_value(value)
        tables.setdefault(table, []).append(f"{last} = {json.dumps(parsed) if isinstance(parsed, str) else value}")
    lines = [f"# {comment}", f"extends = {json.dumps(parent)}", *tables.pop("", [])]
    for table, entries in tables.items():
        lines += ["", f"[{table}]", *entries]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "\n".join(lines) + "\n")


def _digest(stage: Stage, specs: Sequence[Spec], checksums: Mapping[str, str]) -> str:
    """Hash everything that the values of a stage depend on: its grid, the recipe and seeds, and the data."""
    grid = {key: list(values) for key, values in stage.items()}
    content = [grid, [as_tables(spec.recipe) for spec in specs], dict(checksums)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def _changes(params: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in params.items()]


def _train(specs: Sequence[Spec], train: Train) -> None:
    """Train runs; a run that diverges counts as a result, any other failure is an error."""
    runs = [folder for spec in specs if (folder := RunFolder(spec.folder)).result is None]
    try:
        train(specs)
    except RunError:
        if any(folder.diverged for folder in runs) and all(folder.diverged or folder.result for folder in runs):
            return
        raise


def _mean_score(specs: Sequence[Spec], metric: str) -> float:
    """Compute the mean over seeds of a validation metric; minus infinity if a seed diverged or the metric is NaN."""
    values = []
    for spec in specs:
        folder = RunFolder(spec.folder)
        result = folder.result
        if result is None and folder.diverged:
            return -math.inf
        if result is None:
            raise RunError(f"{spec.folder}: has no result")
        values.append(float(result["dev"][metric]))
    mean = statistics.fmean(values)
    return -math.inf if math.isnan(mean) else mean  # Optuna takes no NaN, and would leave the trial out
