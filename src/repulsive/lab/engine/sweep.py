"""Settings chosen on the development set, stage by stage, as the paper does: epsilon and alpha, then beta.

Trials live in an Optuna storage, so a sweep can be stopped and resumed, shared by several machines, and looked at with
Optuna's own tools. Test sets play no part.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repulsive.errors import ConfigError, RunError
from repulsive.lab.engine.config import as_tables, parse_value
from repulsive.lab.engine.files import write_errors, write_text
from repulsive.lab.engine.launch import Spec
from repulsive.lab.engine.runs import RunFolder
from repulsive.safety.files import refuse_link
from repulsive.safety.secrets import redact, redact_word

DATABASE = "optuna.db"
_COMMA = re.compile(r",(?![^\[]*\])")  # but those inside brackets
Stage = Mapping[str, Sequence[str]]  # key -> values, as they are written in a recipe
Train = Callable[[Sequence[Spec]], None]
Plan = Callable[[Sequence[str]], list[Spec]]  # key=value changes -> the runs of a trial, one for every seed

DEFAULTS: dict[str, list[dict[str, list[str]]]] = {  # by the recipe's rule
    "none": [{"optimizer.lr": ["0.0003", "0.001", "0.003"], "model.dropout": ["0.1", "0.3", "0.5"]}],
    "sgld": [{"method.stepsize": ["0.1", "1.0"], "method.temperature": ["1e-10", "1e-8", "1e-6"]}],
    "svgd": [{"method.stepsize": ["0.01", "0.1", "1.0"], "method.alpha": ["0.001", "0.01", "0.1", "1.0"]}],
    "cosine": [{"method.stepsize": ["0.1", "1.0"], "method.alpha": ["0.001", "0.01", "0.1"]}],
}
DEFAULTS["spos"] = [*DEFAULTS["svgd"], {"method.beta": ["100.0", "1000.0", "10000.0", "100000.0"]}]


@dataclass(frozen=True)
class Trial:
    """One point of a grid, tried.

    Args:
        changes: `key=value`, those chosen in earlier stages included.
        value: mean over seeds of the metric of the development set; minus infinity where one of them diverged.
        stage: from 1 on.
    """

    changes: tuple[str, ...]
    value: float
    stage: int


def parse_stage(words: Sequence[str]) -> dict[str, list[str]]:
    """`["method.alpha=0.1,1", ...]` as a grid.

    Raises:
        ConfigError: a word is not `key=value,value`.
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
    """Try every point of every stage; each stage builds on the best point of the one before.

    What was tried with another grid, other settings, seeds or data is not taken for an answer: it is another study.

    Args:
        name: of the study, in the storage.
        stages: the grids.
        plan: `key=value` changes -> the runs of a trial.
        train: trains runs, side by side.
        metric: of the development set; higher is better.
        storage: an Optuna storage, such as "sqlite:///sweep.db".
        place: names where this sweep trains, which no other process does: trials that began there and have not ended
            are of a process that died.
        checksums: of the data.
        at_once: trials whose runs are given to `train` together.
        on_trial: told of every trial as it ends.

    Returns:
        All trials, those of earlier calls included, stage by stage in the order of the grid; the last stage's best is
        `best(trials)`.

    Raises:
        ConfigError: Optuna is not installed, or the storage cannot be opened.
        RunError: nothing is left to try but what is being tried elsewhere; a run failed; all points diverged.
    """
    chosen: tuple[str, ...] = ()
    found: list[Trial] = []
    for number, stage in enumerate(stages, 1):
        study = _study(f"{name}/{number}/{_digest(stage, plan(chosen), checksums or {})}", storage)
        study.set_user_attr("metric", metric)
        study.set_user_attr("fixed", list(chosen))
        _enqueue(study, stage, place)
        while batch := _take(study, stage, at_once, place):
            runs = {trial.number: plan([*chosen, *_changes(trial.params)]) for trial in batch}
            _train([spec for specs in runs.values() for spec in specs], train)
            for trial in batch:
                value = _value(runs[trial.number], metric)
                study.tell(trial, value)
                if on_trial is not None:
                    on_trial(Trial((*chosen, *_changes(trial.params)), value, number))
        _check_all_ended(study)
        ended = [t for t in study.get_trials(deepcopy=False) if t.value is not None]
        points = _points(stage)  # trial numbers depend on what was killed when; the order of the grid does not
        ended.sort(key=lambda t: (points.index(t.params) if t.params in points else len(points), t.number))
        trials = [Trial((*chosen, *_changes(t.params)), float(t.value or 0), number) for t in ended]
        found += trials
        top = best(trials)
        chosen = top.changes
        if top.value == -math.inf:
            raise RunError(f"stage {number}: training diverged at all of its {len(trials)} points; try smaller rates")
    return found


def best(trials: Sequence[Trial]) -> Trial:
    """The best trial of the last stage; of equal ones the first, which `sweep` returns in the order of the grid."""
    last = max(trial.stage for trial in trials)
    return max((trial for trial in trials if trial.stage == last), key=lambda trial: trial.value)


def storage_in(folder: Path) -> str:
    """The SQLite storage of a sweep's folder.

    Raises:
        RunError: its file is a link, which SQLite would follow.
    """
    with write_errors(folder):
        refuse_link(folder / DATABASE)
    return f"sqlite:///{(folder / DATABASE).resolve()}"


def write_recipe(path: Path, parent: str, changes: Sequence[str], comment: str) -> None:
    """A recipe that extends `parent` by the chosen settings."""
    tables: dict[str, list[str]] = {}
    last_ones = {key.strip(): value for key, _, value in (change.partition("=") for change in changes)}
    for key, value in last_ones.items():
        table, _, last = key.rpartition(".")
        parsed = parse_value(value)
        tables.setdefault(table, []).append(f"{last} = {json.dumps(parsed) if isinstance(parsed, str) else value}")
    lines = [f"# {comment}", f"extends = {json.dumps(parent)}", *tables.pop("", [])]
    for table, entries in tables.items():
        lines += ["", f"[{table}]", *entries]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "\n".join(lines) + "\n")


def _study(name: str, storage: str) -> Any:
    try:
        import optuna
    except ImportError:
        raise ConfigError("a sweep needs the package optuna: pip install 'repulsive[train]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return optuna.create_study(study_name=name, storage=storage, direction="maximize", load_if_exists=True)
    except Exception as error:  # SQLAlchemy's, whichever database it is
        why = (str(error).splitlines() or [type(error).__name__])[0].replace(storage, "it")
        raise ConfigError(f"storage {redact_word(storage)!r} cannot be opened: {redact(why)}") from None


def _digest(stage: Stage, specs: Sequence[Spec], checksums: Mapping[str, str]) -> str:
    """Of all that a stage's values depend on: its grid, the recipe and the seeds it starts from, and the data."""
    grid = {key: list(values) for key, values in stage.items()}
    told = [grid, [as_tables(spec.recipe) for spec in specs], dict(checksums)]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]


def _points(stage: Stage) -> list[dict[str, str]]:
    """The points of a grid, in its order."""
    return [dict(zip(stage, values, strict=True)) for values in itertools.product(*stage.values())]


def _enqueue(study: Any, stage: Stage, place: str) -> None:
    """Put every point of the grid into the queue that is not there yet, and those again whose process died here."""
    from optuna.trial import TrialState

    points = _points(stage)
    for trial in study.get_trials(deepcopy=False):
        if trial.state == TrialState.RUNNING and trial.user_attrs.get("place") == place:
            study.tell(trial.number, state=TrialState.FAIL)
    known = [
        t.system_attrs.get("fixed_params", t.params)
        for t in study.get_trials(deepcopy=False)
        if t.state != TrialState.FAIL
    ]
    for point in points:
        if point not in known:
            study.enqueue_trial(point)


def _take(study: Any, stage: Stage, most: int, place: str) -> list[Any]:
    """Trials from the queue; others may be taking from it too."""
    from optuna.trial import TrialState

    taken: list[Any] = []
    while len(taken) < most and study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        trial = study.ask()
        trial.set_user_attr("place", place)
        for key, values in stage.items():
            trial.suggest_categorical(key, list(values))
        taken.append(trial)
    return taken


def _check_all_ended(study: Any) -> None:
    """Raise where a point is still being tried: it may be the best."""
    from optuna.trial import TrialState

    if left := study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        places = ", ".join(sorted({str(trial.user_attrs.get("place")) for trial in left}))
        raise RunError(
            f"{len(left)} trials of this sweep are not finished at {places}; run the same command when they are, and "
            "there again if that sweep has died"
        )


def _changes(params: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in params.items()]


def _train(specs: Sequence[Spec], train: Train) -> None:
    """A run that diverges is an answer; any other that fails is not."""
    todo = [folder for spec in specs if (folder := RunFolder(spec.folder)).result is None]
    try:
        train(specs)
    except RunError:
        if any(folder.diverged for folder in todo) and all(folder.diverged or folder.result for folder in todo):
            return
        raise


def _value(specs: Sequence[Spec], metric: str) -> float:
    values = []
    for spec in specs:
        folder = RunFolder(spec.folder)
        result = folder.result
        if result is None and folder.diverged:
            return -math.inf
        if result is None:
            raise RunError(f"{spec.folder}: has no result")
        values.append(float(result["dev"][metric]))
    return statistics.fmean(values)
