"""The runs behind a table: find their folders, as `repulsive train` makes them, and train missing runs."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from repulsive.errors import RunError
from repulsive.lab.engine.config import as_tables
from repulsive.lab.engine.launch import Spec, train_here, train_many
from repulsive.lab.engine.recipe_tables import differences
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.paper.datasets import Dataset
from repulsive.lab.paper.options import Log, Options
from repulsive.lab.runs.export import export
from repulsive.lab.runs.plan import folder_name
from repulsive.lab.systems.glue.start import CONFIG, EXPORT
from repulsive.lab.systems.registry import make_task, open_recipe
from repulsive.terminal.progress import as_time


@dataclass(frozen=True)
class RunSet:
    """The runs of one row on one dataset, all seeds.

    Args:
        dataset: dataset that the runs train on.
        method: name of the row in `published.toml`.
        recipe: name of the recipe.
        name: name of the folder below the folder of all runs.
        changes: `key=value` settings that distinguish the row from other rows with the same recipe.
        hidden_changes: further changes, which are not part of the folder's name.
        seeds: number of runs; None: the number in the options.
        stage: runs of a stage start after those of earlier stages.
    """

    dataset: Dataset
    method: str
    recipe: str
    name: str
    changes: tuple[str, ...] = ()
    hidden_changes: tuple[str, ...] = ()
    seeds: int | None = None
    stage: int = 0

    def folder(self, options: Options) -> Path:
        """Return the folder of all seeds."""
        return options.runs / folder_name(self.name, [*self.changes, *options.changes])

    def seed_folders(self, options: Options) -> list[Path]:
        """Return the folder of each run."""
        count = options.seeds if self.seeds is None else self.seeds
        return [self.folder(options) / f"seed-{seed}" for seed in range(count)]

    def specs(self, options: Options) -> list[Spec]:
        """Return the specification of each run.

        Raises:
            ConfigError: the recipe does not accept the changes.
        """
        data = f"data.folder={self.dataset.folder(options.data)}"
        changes = [data, *self.hidden_changes, *self.changes, *options.changes]
        recipe = open_recipe(self.recipe, changes)
        return [
            Spec(dataclasses.replace(recipe, seed=seed), folder, options.device)
            for seed, folder in enumerate(self.seed_folders(options))
        ]

    def finished(self, options: Options) -> dict[int, RunFolder]:
        """Return seed -> finished run."""
        runs = {seed: RunFolder(folder) for seed, folder in enumerate(self.seed_folders(options))}
        return {seed: run for seed, run in runs.items() if run.result is not None}


def method_runs(
    dataset: Dataset, method: str, recipe: str = "", changes: Sequence[str] = (), hidden_changes: Sequence[str] = ()
) -> RunSet:
    """Make the run set of a method on a dataset; `recipe`: last part of the recipe's name if it is not the method."""
    leaf = recipe or method
    name = f"{dataset.name}/{dataset.prefix}{leaf}"
    return RunSet(dataset, method, dataset.recipe(leaf), name, tuple(changes), tuple(hidden_changes))


def count_finished(run_sets: Iterable[RunSet], options: Options) -> tuple[int, int]:
    """Count the finished runs, and all runs."""
    folders = {folder for runs in run_sets for folder in runs.seed_folders(options)}
    return sum((folder / "result.json").is_file() for folder in folders), len(folders)


def train(run_sets: Sequence[RunSet], options: Options, log: Log) -> list[str]:
    """Train all runs that have not finished, stage by stage.

    Returns:
        One message for each failed run; all others have finished.

    Raises:
        RunError: a folder holds a run with other settings.
        Stopped: Ctrl-C or SIGTERM; runs in progress are saved.
    """
    failed: list[str] = []
    for stage in sorted({runs.stage for runs in run_sets}):
        of_stage = [runs for runs in run_sets if runs.stage == stage]
        specs = {spec.folder: spec for runs in of_stage for spec in runs.specs(options)}
        missing = [spec for spec in specs.values() if not _is_finished(spec)]
        if missing:
            log(f"{len(missing)} of {len(specs)} runs to train")
            failed += _train_here(missing, log) if options.jobs == 1 else _train_many(missing, options.jobs, log)
        _export_pretrained(of_stage, options)
    return failed


def _export_pretrained(run_sets: Sequence[RunSet], options: Options) -> None:
    """Export pre-trained models to the folders in which fine-tuning looks for them."""
    pretrained = [runs for runs in run_sets if runs.dataset.kind == "electra"]
    for run in (run for runs in pretrained for run in runs.finished(options).values()):
        if not (run.path / EXPORT / CONFIG).is_file():
            export(run.path, run.path / EXPORT)


def _train_here(specs: Sequence[Spec], log: Log) -> list[str]:
    failed, countdown, live = [], _Countdown(len(specs)), sys.stderr.isatty()
    for spec in specs:
        try:
            train_here(spec, make_task, quiet=not live)
            log(f"{spec.folder}: done{countdown.next()}")
        except RunError as error:
            failed.append(str(error))
    return failed


def _train_many(specs: Sequence[Spec], jobs: int, log: Log) -> list[str]:
    failed: list[str] = []
    countdown, live = _Countdown(len(specs)), sys.stderr.isatty()

    def on_end(spec: Spec, state: str) -> None:
        if not live:
            log(f"{spec.folder}: {state}{countdown.next()}")
        if state not in ("done", "stopped"):
            failed.append(f"{spec.folder}: {state}")

    try:
        train_many(specs, make_task, jobs, on_end, show=live)
    except RunError as error:  # some runs failed, and all others have finished
        return failed or [str(error)]
    return failed


class _Countdown:
    """The number of runs that have ended, and the time left for the others at the same speed."""

    def __init__(self, total: int) -> None:
        self._total, self._ended, self._began = total, 0, time.monotonic()

    def next(self) -> str:
        """Count a run that has ended, and format the text after its state."""
        self._ended += 1
        left = (time.monotonic() - self._began) / self._ended * (self._total - self._ended)
        return f" ({self._ended} of {self._total} runs, {as_time(left)} left)"


def _is_finished(spec: Spec) -> bool:
    """Whether a run has finished; a run with other settings in its folder is an error."""
    folder = RunFolder(spec.folder)
    if folder.result is None:
        return False
    if changed := differences(as_tables(spec.recipe), folder.recipe):
        raise RunError(f"{spec.folder}: was trained with another {', '.join(changed)}; choose another --runs")
    return True
