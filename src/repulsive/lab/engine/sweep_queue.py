"""The trials of a sweep as an Optuna study: a queue that survives crashes and that several machines can share."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from repulsive.errors import ConfigError, RunError
from repulsive.extras import install_command
from repulsive.safety.secrets import redact, redact_word

Stage = Mapping[str, Sequence[str]]  # key -> values, as they are written in a recipe


def open_study(name: str, storage: str) -> Any:
    """Open an Optuna study, or create it.

    Args:
        name: name of the study.
        storage: an Optuna storage, such as "sqlite:///sweep.db".

    Raises:
        ConfigError: Optuna is not installed, or the storage cannot be opened.
    """
    try:
        import optuna
    except ImportError:
        raise ConfigError(f"a sweep needs the package optuna: {install_command('train')}") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return optuna.create_study(study_name=name, storage=storage, direction="maximize", load_if_exists=True)
    except Exception as error:  # SQLAlchemy raises errors that depend on the database
        why = (str(error).splitlines() or [type(error).__name__])[0].replace(storage, "it")
        raise ConfigError(f"storage {redact_word(storage)!r} cannot be opened: {redact(why)}") from None


def grid_points(stage: Stage) -> list[dict[str, str]]:
    """List the points of a grid, in the order of the grid."""
    return [dict(zip(stage, values, strict=True)) for values in itertools.product(*stage.values())]


def enqueue(study: Any, stage: Stage, place: str) -> None:
    """Queue every grid point that is not in the study yet, and points whose process died at this `place`.

    Queued trials have a place from the start: a process can die after `study.ask` and before `take` writes its place.
    """
    from optuna.trial import TrialState

    for trial in study.get_trials(deepcopy=False):
        if trial.state == TrialState.RUNNING and trial.user_attrs.get("place") == place:
            study.tell(trial.number, state=TrialState.FAIL)
    queued = [
        trial.system_attrs.get("fixed_params", trial.params)
        for trial in study.get_trials(deepcopy=False)
        if trial.state != TrialState.FAIL
    ]
    for point in grid_points(stage):
        if point not in queued:
            study.enqueue_trial(point, user_attrs={"place": place})


def take(study: Any, stage: Stage, most: int, place: str) -> list[Any]:
    """Take up to `most` trials from the queue; other processes may be taking some too."""
    from optuna.trial import TrialState

    taken: list[Any] = []
    while len(taken) < most and study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        trial = study.ask()
        trial.set_user_attr("place", place)
        for key, values in stage.items():
            trial.suggest_categorical(key, list(values))
        taken.append(trial)
    return taken


def check_all_ended(study: Any) -> None:
    """Check that no trial is still running, because a running trial may turn out to be the best.

    Raises:
        RunError: a trial is still running.
    """
    from optuna.trial import TrialState

    if running := study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        places = ", ".join(sorted({str(trial.user_attrs.get("place")) for trial in running}))
        raise RunError(
            f"{len(running)} trials of this sweep are not finished at {places}; run the same command again when they "
            "are, or rerun it there if that sweep has died"
        )


def ended_trials(study: Any, stage: Stage) -> list[Any]:
    """List trials with a value, in the order of the grid: the order of their numbers depends on crashes."""
    points = grid_points(stage)
    ended = [trial for trial in study.get_trials(deepcopy=False) if trial.value is not None]
    return sorted(ended, key=lambda t: (points.index(t.params) if t.params in points else len(points), t.number))
