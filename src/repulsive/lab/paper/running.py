"""From rows of a table to runs: folders as `repulsive train` makes them, trained once, whoever asks for them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from repulsive.errors import RunError
from repulsive.lab.engine.config import as_tables
from repulsive.lab.engine.launch import Spec, train_here, train_many
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.paper.datasets import DataSet
from repulsive.lab.runs.export import export
from repulsive.lab.runs.plan import folder_name
from repulsive.lab.systems.glue.start import CONFIG, EXPORT
from repulsive.lab.systems.registry import make_task, open_recipe

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What the command line asks for.

    Args:
        data: folder of prepared folders.
        out: where tables and figures go.
        runs: folder of all runs.
        seeds: of every row.
        device: "cpu", "cuda" or None for what is there.
        jobs: runs at the same time; 0: as many as there are cores; 1: in this process.
        changes: `key=value` for every run; part of their folders' names.
        methods: rows to train, beside the first of each table; none: all.
        datasets: which; none: the paper's.
        judgements: files of the judges, and the key.
        toy: everything at toy size, on generated data.
        times: measure what a step takes.
    """

    data: Path = Path("prepared")
    out: Path = Path("reproduced")
    runs: Path = Path("runs")
    seeds: int = 6
    device: str | None = None
    jobs: int = 0
    changes: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    judgements: tuple[Path, ...] = ()
    toy: bool = False
    times: bool = True


@dataclass(frozen=True)
class RunSet:
    """The runs of one row on one data set, all seeds.

    Args:
        data: the data set.
        method: what the row is called in `published.toml`.
        recipe: name of the recipe.
        name: of the folder below that of all runs.
        changes: `key=value` that tell it from other rows of the recipe.
        hidden: further ones, which are no part of the folder's name.
        seeds: how many; None: as the options say.
        stage: runs of a stage need those of the stages before.
    """

    data: DataSet
    method: str
    recipe: str
    name: str
    changes: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    seeds: int | None = None
    stage: int = 0

    def folder(self, options: Options) -> Path:
        """Where all its seeds are."""
        return options.runs / folder_name(self.name, [*self.changes, *options.changes])

    def places(self, options: Options) -> list[Path]:
        """The folder of each run."""
        count = options.seeds if self.seeds is None else self.seeds
        return [self.folder(options) / f"seed-{seed}" for seed in range(count)]

    def specs(self, options: Options) -> list[Spec]:
        """The runs.

        Raises:
            ConfigError: the recipe does not fit the changes.
        """
        place = f"data.folder={self.data.folder(options.data)}"
        changes = [place, *self.data.changes, *self.hidden, *self.changes, *options.changes]
        recipe = open_recipe(self.recipe, changes)
        return [
            Spec(dataclasses.replace(recipe, seed=seed), folder, options.device)
            for seed, folder in enumerate(self.places(options))
        ]

    def finished(self, options: Options) -> dict[int, RunFolder]:
        """Seed -> run that has ended."""
        runs = {seed: RunFolder(folder) for seed, folder in enumerate(self.places(options))}
        return {seed: run for seed, run in runs.items() if run.result is not None}


def row(
    data: DataSet, method: str, recipe: str = "", changes: Sequence[str] = (), hidden: Sequence[str] = ()
) -> RunSet:
    """The runs of a method on a data set; `recipe` is the last word of the recipe's name, where it is another."""
    leaf = recipe or method
    return RunSet(data, method, data.recipe(leaf), f"{data.name}/{data.prefix}{leaf}", tuple(changes), tuple(hidden))


def progress(rows: Iterable[RunSet], options: Options) -> tuple[int, int]:
    """How many of all runs have ended, and how many there are."""
    places = {place for each in rows for place in each.places(options)}
    return sum((place / "result.json").is_file() for place in places), len(places)


def train(rows: Sequence[RunSet], options: Options, tell: Tell) -> list[str]:
    """Train what has not been trained, stage by stage.

    Returns:
        What went wrong with runs that failed, a line each; the others have ended.

    Raises:
        RunError: a folder holds a run of other settings.
        Stopped: Ctrl-C or SIGTERM came; runs that had begun are saved.
    """
    failed: list[str] = []
    for stage in sorted({each.stage for each in rows}):
        wanted = {spec.folder: spec for each in rows if each.stage == stage for spec in each.specs(options)}
        todo = [spec for spec in wanted.values() if not _ended(spec)]
        if todo:
            tell(f"{len(todo)} of {len(wanted)} runs to train")
            failed += _train_here(todo, tell) if options.jobs == 1 else _train_many(todo, options.jobs, tell)
        _export([each for each in rows if each.stage == stage], options)
    return failed


def _export(rows: Sequence[RunSet], options: Options) -> None:
    """Leave what pre-training made where fine-tuning looks for it."""
    for run in (run for each in rows if each.data.kind == "electra" for run in each.finished(options).values()):
        if not (run.path / EXPORT / CONFIG).is_file():
            export(run.path, run.path / EXPORT)


def _train_here(specs: Sequence[Spec], tell: Tell) -> list[str]:
    failed = []
    for spec in specs:
        try:
            train_here(spec, make_task, quiet=True)
            tell(f"{spec.folder}: done")
        except RunError as error:
            failed.append(str(error))
    return failed


def _train_many(specs: Sequence[Spec], jobs: int, tell: Tell) -> list[str]:
    failed: list[str] = []

    def ended(spec: Spec, how: str) -> None:
        tell(f"{spec.folder}: {how}")
        if how not in ("done", "stopped"):
            failed.append(f"{spec.folder}: {how}")

    try:
        train_many(specs, make_task, jobs, ended)
    except RunError as error:  # some runs failed, and all others have ended
        return failed or [str(error)]
    return failed


def _ended(spec: Spec) -> bool:
    """Whether a run has ended; one of other settings in its folder is an error, not a result."""
    folder = RunFolder(spec.folder)
    if folder.result is None:
        return False
    wanted, known = json.loads(json.dumps(as_tables(spec.recipe))), folder.recipe
    other = sorted(_flat(wanted) ^ _flat(known))
    if other:
        keys = ", ".join(dict.fromkeys(key for key, _ in other))
        raise RunError(f"{spec.folder}: was trained with another {keys}; choose another --runs")
    return True


def _flat(tree: object, place: str = "") -> set[tuple[str, str]]:
    if isinstance(tree, dict):
        return {each for key, value in tree.items() for each in _flat(value, f"{place}.{key}".strip("."))}
    return {(place, json.dumps(tree))}
