"""Train the runs of a study: grids of settings, runs that are not repeated, and a time limit.

Used by every study that trains runs; `output` writes their results and `arguments` reads their command lines.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from repulsive.errors import RepulsiveError, RunError
from repulsive.lab.engine.config import as_tables
from repulsive.lab.engine.launch import MakeTask, Spec, train_here, train_many
from repulsive.lab.engine.recipe_tables import differences
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.workers import DONE
from repulsive.lab.runs.plan import folder_name, plan
from repulsive.lab.systems.registry import make_task

Grid = dict[str, Sequence[Any]]
MARGIN = 1.2  # a run is expected to take at most this many times as long as the longest one before


def points(grids: Sequence[Grid]) -> Iterator[tuple[str, ...]]:
    """`key=value` changes of every point of some grids."""
    for grid in grids:
        for values in itertools.product(*grid.values()):
            yield tuple(f"{key}={json.dumps(value)}" for key, value in zip(grid, values, strict=True))


class Study:
    """All runs on one dataset.

    Args:
        task: name of the dataset, which is also a folder of recipes.
        out: folder of its runs.
        common: `key=value` changes of all runs.
        device: "cpu" or "cuda"; None uses CUDA if available.
    """

    def __init__(self, task: str, out: Path, common: Sequence[str], device: str | None) -> None:
        self.task, self.out, self.common, self.device = task, out, list(common), device

    def recipe(self, method: str) -> str:
        """Name of a method's recipe."""
        return f"{self.task}/{method}"

    def folder(self, method: str, changes: Sequence[str], stage: str) -> Path:
        """Folder of all seeds of a method with some changes."""
        return self.out / stage / folder_name(method, changes)

    def specs(self, method: str, changes: Sequence[str], seeds: range, stage: str) -> list[Spec]:
        """The runs of a method with some changes, one for each seed."""
        specs = []
        for seed in seeds:
            (spec,) = plan([self.recipe(method)], [*self.common, *changes], seed=seed, device=self.device)
            specs.append(dataclasses.replace(spec, folder=self.folder(method, changes, stage) / f"seed-{seed}"))
        return specs


def dev_results(grid: Mapping[tuple[str, ...], Sequence[Spec]]) -> list[dict[str, Any]]:
    """Metrics on the development set, means over seeds, of all points that have a result.

    Args:
        grid: changes of every point -> its runs.
    """
    table = []
    for changes, specs in grid.items():
        dev = [result["dev"] for spec in specs if (result := RunFolder(spec.folder).result) is not None]
        if dev:
            means = {name: round(statistics.fmean(d[name] for d in dev if name in d), 6) for name in dev[0]}
            table.append({"changes": list(changes), "seeds": len(dev), "dev": means})
    return table


def is_finished(spec: Spec) -> bool:
    """Whether a run has a result, or diverged and will never have one."""
    return RunFolder(spec.folder).result is not None or RunFolder(spec.folder).diverged


class TimeLimit:
    """Decide whether a run can finish in time, from the longest earlier run of the same dataset and stage.

    Args:
        seconds: from now on; None for no limit.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._end = math.inf if seconds is None else time.monotonic() + seconds
        self._longest: dict[Path, float] = {}
        self._started: dict[Path, float] = {}

    @property
    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    def may_start(self, spec: Spec) -> bool:
        """Whether a run can start now; if so, its time is measured from now on."""
        self._started[spec.folder] = time.monotonic()
        kind = spec.folder.parents[1]
        longest = self._longest.get(kind)
        if not longest:
            results = (RunFolder(path.parent).result or {} for path in kind.glob("*/seed-*/result.json"))
            longest = max((result.get("seconds", 0.0) for result in results), default=0.0)
        return self._started[spec.folder] + MARGIN * longest <= self._end

    def on_end(self, spec: Spec) -> None:
        """Record how long a run took."""
        seconds, kind = time.monotonic() - self._started[spec.folder], spec.folder.parents[1]
        self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))


def train_missing(
    specs: Sequence[Spec],
    title: str,
    jobs: int = 0,
    *,
    limit: TimeLimit | None = None,
    make: MakeTask = make_task,
    here: bool = False,
    keep_weights: bool | Callable[[Spec], bool] = True,
) -> None:
    """Train all runs that have not finished, in this order. Continue after a failed run: a grid point may diverge.

    Args:
        specs: the runs.
        title: of the printed messages.
        jobs: number of runs in parallel; 0 uses all cores.
        limit: runs that it does not let start are left for a later call.
        make: recipe -> task.
        here: train in this process, one run after the other.
        keep_weights: False deletes the weights of every finished run; a function decides for each run.
    """
    started, limit = time.monotonic(), limit or TimeLimit()
    missing = [spec for spec in specs if not is_finished(spec)]
    print(f"{title}: {len(specs)} runs, {len(missing)} to do", flush=True)

    def on_end(spec: Spec, state: str) -> None:
        limit.on_end(spec)
        if state != DONE:
            print(spec.folder, state, flush=True)
        if state == DONE and not (keep_weights(spec) if callable(keep_weights) else keep_weights):
            drop_weights(spec)

    if here:
        _train_in_sequence(missing, make, limit.may_start, on_end)
    elif missing:
        try:
            train_many(missing, make, jobs, on_end, may_start=limit.may_start)
        except RunError as error:
            print(error, flush=True)
    left = sum(not is_finished(spec) for spec in missing)
    print(f"{title}: {time.monotonic() - started:.0f} s" + (f", {left} left" if left else ""), flush=True)


def drop_weights(spec: Spec) -> None:
    """Delete the weights of a finished run; its result and its predictions stay."""
    for name in ("best", "checkpoints"):
        shutil.rmtree(spec.folder / name, ignore_errors=True)


def _train_in_sequence(
    specs: Sequence[Spec], make: MakeTask, may_start: Callable[[Spec], bool], on_end: Callable[[Spec, str], None]
) -> None:
    for spec in specs:
        if may_start(spec):
            try:
                train_here(spec, make, quiet=True)
            except RepulsiveError as error:
                on_end(spec, " ".join(str(error).split()))
            else:
                on_end(spec, DONE)


def check(spec: Spec) -> None:
    """Raise if a finished run has other settings; the path of its data does not matter."""
    folder = RunFolder(spec.folder)
    if folder.result is not None:
        changed = differences(as_tables(spec.recipe), folder.recipe, ignore=["data.folder"])
        if changed:
            raise RunError(f"{spec.folder}: was trained with another {', '.join(changed)}; choose another --out")


class StagedStudy(Protocol):
    """A study in stages, whose later runs depend on the results of earlier ones."""

    def required_runs(self, stage: str) -> dict[Path, Spec]:
        """Folder -> run, of all runs of a stage that the results so far determine."""
        ...


def train_stages(
    studies: Sequence[StagedStudy],
    stages: Sequence[str],
    arguments: argparse.Namespace,
    make: MakeTask = make_task,
    keep_weights: Callable[[Spec], bool] = lambda spec: False,
) -> None:
    """Train all runs that are determined so far, then those that their results determine, until there are no more.

    Args:
        studies: one for each dataset.
        stages: in this order.
        arguments: of the command line: `limit`, `jobs`, `drop_weights`.
        make: recipe -> task.
        keep_weights: runs that keep their weights even with `--drop-weights`.
    """
    limit, seen = TimeLimit(arguments.limit), set[Path]()
    while True:
        specs = {
            folder: spec for stage in stages for study in studies for folder, spec in study.required_runs(stage).items()
        }
        new = [spec for folder, spec in specs.items() if folder not in seen]
        if not new:
            return
        for spec in new:
            check(spec)
        seen |= {spec.folder for spec in new}
        train_missing(
            new,
            ", ".join(stages),
            arguments.jobs,
            limit=limit,
            make=make,
            here=arguments.jobs == 1,
            keep_weights=keep_weights if arguments.drop_weights else True,
        )
