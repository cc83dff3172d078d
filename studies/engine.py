"""What the studies of this folder share: grids, runs that are not made twice, a time limit, tables."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from repulsive.errors import RepulsiveError, RunError
from repulsive.lab.engine.config import as_tables
from repulsive.lab.engine.files import read_json
from repulsive.lab.engine.launch import MakeTask, Spec, train_here, train_many
from repulsive.lab.engine.runs import RUN, RunFolder
from repulsive.lab.engine.stop_signals import Stopped
from repulsive.lab.engine.tables import Row, as_plain, finite
from repulsive.lab.engine.workers import DONE
from repulsive.lab.runs.plan import folder_name, plan
from repulsive.lab.systems.registry import make_task

Grid = dict[str, Sequence[Any]]
MARGIN = 1.2  # runs take so many times as long as the longest one before, at most


def points(grids: Sequence[Grid]) -> Iterator[tuple[str, ...]]:
    """`key=value` changes of every point of some grids."""
    for grid in grids:
        for values in itertools.product(*grid.values()):
            yield tuple(f"{key}={json.dumps(value)}" for key, value in zip(grid, values, strict=True))


class Study:
    """All runs of one task.

    Args:
        task: its name, a folder of recipes.
        out: where its runs go.
        common: `key=value` changes of all of them.
        device: "cpu", "cuda" or None for what is there.
    """

    def __init__(self, task: str, out: Path, common: Sequence[str], device: str | None) -> None:
        self.task, self.out, self.common, self.device = task, out, list(common), device

    def recipe(self, method: str) -> str:
        """The recipe of a method."""
        return f"{self.task}/{method}"

    def folder(self, method: str, changes: Sequence[str], stage: str) -> Path:
        """Where the runs of a method with some changes are, all seeds."""
        return self.out / stage / folder_name(method, changes)

    def specs(self, method: str, changes: Sequence[str], seeds: range, stage: str) -> list[Spec]:
        """The runs of a method with some changes."""
        found = []
        for seed in seeds:
            (spec,) = plan([self.recipe(method)], [*self.common, *changes], seed=seed, device=self.device)
            found.append(dataclasses.replace(spec, folder=self.folder(method, changes, stage) / f"seed-{seed}"))
        return found


def tried(grid: Mapping[tuple[str, ...], Sequence[Spec]]) -> list[dict[str, Any]]:
    """The development set's metrics of all points that have a result, means over seeds.

    Args:
        grid: the changes of every point -> its runs.
    """
    table = []
    for changes, specs in grid.items():
        dev = [result["dev"] for spec in specs if (result := RunFolder(spec.folder).result) is not None]
        if dev:
            means = {name: round(statistics.fmean(d[name] for d in dev if name in d), 6) for name in dev[0]}
            table.append({"changes": list(changes), "seeds": len(dev), "dev": means})
    return table


def ended(spec: Spec) -> bool:
    """Whether a run has a result, or will never have one."""
    return RunFolder(spec.folder).result is not None or RunFolder(spec.folder).diverged


class Clock:
    """Whether a run can still end in time, judged by the longest one of its kind: those of one task and stage.

    Args:
        limit: seconds from now on; None: there is no hurry.
    """

    def __init__(self, limit: float | None = None) -> None:
        self._end = math.inf if limit is None else time.monotonic() + limit
        self._longest: dict[Path, float] = {}
        self._began: dict[Path, float] = {}

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()

    def may_start(self, spec: Spec) -> bool:
        """Whether to start a run now; if so, its time is taken from now on."""
        self._began[spec.folder] = time.monotonic()
        known = (RunFolder(path.parent).result or {} for path in spec.folder.parents[1].glob("*/seed-*/result.json"))
        longest = self._longest.get(spec.folder.parents[1]) or max((r.get("seconds", 0.0) for r in known), default=0.0)
        return self._began[spec.folder] + MARGIN * longest <= self._end

    def ended(self, spec: Spec) -> None:
        """A run has ended."""
        took, kind = time.monotonic() - self._began[spec.folder], spec.folder.parents[1]
        self._longest[kind] = max(took, self._longest.get(kind, 0.0))


def run(
    specs: Sequence[Spec],
    title: str,
    jobs: int = 0,
    *,
    clock: Clock | None = None,
    make: MakeTask = make_task,
    here: bool = False,
    keep_weights: bool | Callable[[Spec], bool] = True,
) -> None:
    """Train what has not ended yet, in this order, and go on when a run fails: a point of a grid may diverge.

    Args:
        specs: the runs.
        title: of what is printed.
        jobs: runs at the same time; 0: as many as there are cores.
        clock: runs that it does not let start are left for another call.
        make: recipe -> task.
        here: one after the other in this process instead.
        keep_weights: False deletes the weights of every run that has ended; or a function that says it of each.
    """
    started, clock = time.monotonic(), clock or Clock()
    left = [spec for spec in specs if not ended(spec)]
    print(f"{title}: {len(specs)} runs, {len(left)} to do", flush=True)

    def on_end(spec: Spec, how: str) -> None:
        clock.ended(spec)
        if how != DONE:
            print(spec.folder, how, flush=True)
        if how == DONE and not (keep_weights(spec) if callable(keep_weights) else keep_weights):
            drop_weights(spec)

    if here:
        _one_by_one(left, make, clock.may_start, on_end)
    elif left:
        try:
            train_many(left, make, jobs, on_end, may_start=clock.may_start)
        except RunError as error:
            print(error, flush=True)
    missing = sum(not ended(spec) for spec in left)
    print(f"{title}: {time.monotonic() - started:.0f} s" + (f", {missing} left" if missing else ""), flush=True)


def drop_weights(spec: Spec) -> None:
    """Delete those of a run that has ended; its result and its answers stay."""
    for name in ("best", "checkpoints"):
        shutil.rmtree(spec.folder / name, ignore_errors=True)


def _one_by_one(
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


def as_table(found: Sequence[Row], runs: Sequence[RunFolder]) -> dict[str, Any]:
    """Rows as JSON takes them, with where and how long their runs were trained."""
    return {
        **{key: read_json(runs[0].path / RUN)["started"][key] for key in ("device", "versions")},
        "seconds_a_run": statistics.median((run.result or {})["seconds"] for run in runs),
        "rows": [as_plain(row) | {"folder": row.folder.name} for row in found],
    }


def save(path: Path, value: Any) -> None:
    """A text, or a value as JSON; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(finite(value), indent=1, default=str) + "\n")


def save_more(path: Path, value: dict[str, Any]) -> None:
    """A JSON object by data sets; what the file says of other ones stays."""
    known = json.loads(path.read_text()) if path.is_file() else {}
    save(path, known | value)


def settings(rows: Sequence[Any]) -> list[str]:
    """A list of Markdown: what every row, which has a `label` and `changes`, changes of its recipe. The last counts."""
    found = []
    for row in rows:
        last = dict(change.split("=", 1) for change in row.changes)
        found.append(f"- {row.label}: {', '.join(f'{key}={value}' for key, value in last.items()) or 'as the recipe'}")
    return ["Settings:", "", *found]


def flat(recipe: Any, above: str = "") -> dict[str, Any]:
    """A recipe, or its tables, as one table: `{"model": {"heads": 3}}` -> `{"model.heads": 3}`."""
    found: dict[str, Any] = {}
    for name, value in (recipe if isinstance(recipe, Mapping) else as_tables(recipe)).items():
        found |= flat(value, f"{above}{name}.") if isinstance(value, Mapping) else {f"{above}{name}": value}
    return found


def check(spec: Spec) -> None:
    """Raise if a run that has ended is one of other settings; where its data lay does not matter."""
    folder = RunFolder(spec.folder)
    if folder.result is not None:
        wanted, known = flat(json.loads(json.dumps(as_tables(spec.recipe)))), flat(folder.recipe)
        other = [key for key in wanted | known if wanted.get(key) != known.get(key) and key != "data.folder"]
        if other:
            raise RunError(f"{spec.folder}: was trained with another {', '.join(other)}; choose another --out")


class Staged(Protocol):
    """A study that knows more runs the more of them have ended."""

    def needed(self, stage: str) -> dict[Path, Spec]:
        """All runs of a stage that are known by now."""
        ...


def work(
    studies: Sequence[Staged],
    stages: Sequence[str],
    arguments: argparse.Namespace,
    make: MakeTask = make_task,
    keep_weights: Callable[[Spec], bool] = lambda spec: False,
) -> None:
    """Train all that is known, then all that is known from that, until nothing new comes.

    Args:
        studies: of several data sets.
        stages: which, in this order.
        arguments: of the command line: `limit`, `jobs`, `drop_weights`.
        make: recipe -> task.
        keep_weights: of which runs, although all others' are dropped.
    """
    clock, seen = Clock(arguments.limit), set[Path]()
    while True:
        specs = {folder: s for stage in stages for study in studies for folder, s in study.needed(stage).items()}
        new = [spec for folder, spec in specs.items() if folder not in seen]
        if not new:
            return
        for spec in new:
            check(spec)
        seen |= {spec.folder for spec in new}
        run(
            new,
            ", ".join(stages),
            arguments.jobs,
            clock=clock,
            make=make,
            here=arguments.jobs == 1,
            keep_weights=keep_weights if arguments.drop_weights else True,
        )


def common_arguments(
    name: str, about: str | None, stages: Sequence[str], scales: Sequence[str]
) -> argparse.ArgumentParser:
    """A parser with what all studies of stages ask for.

    Args:
        name: of the study: its folders are called so.
        about: the script's docstring.
        stages: which there are, without `tables`.
        scales: how much is trained; the first one by default.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", nargs="+", default=[*stages, "tables"], choices=[*stages, "tables"])
    parser.add_argument("--data", type=Path, default=Path("prepared"))
    parser.add_argument("--out", type=Path, default=Path("runs") / name)
    parser.add_argument("--results", type=Path, default=Path("results") / name)
    parser.add_argument("--tuning-seeds", type=int, default=1, help="of what looks at the development set, from 100 on")
    parser.add_argument("--seeds", type=int, default=3, help="of final, from 0 on")
    parser.add_argument("--jobs", type=int, default=0, help="runs side by side; 1: in this process")
    parser.add_argument("--device")
    parser.add_argument("--limit", type=float, help="seconds; runs that would take longer are not started")
    parser.add_argument("--drop-weights", action="store_true", help="delete those of every run that has ended")
    parser.add_argument("--set", action="append", default=[], help="key=value, for every run")
    parser.add_argument("--scale", choices=list(scales), default=scales[0], help="tiny: to try the script")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, train nothing")
    return parser


@contextmanager
def in_one_line(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Errors of ours, and a stop, as a line and an exit code; a reader who has seen enough is none."""
    try:
        yield
    except Stopped as stopped:
        parser.exit(stopped.code, f"{stopped}\n")
    except KeyboardInterrupt:
        parser.exit(130, "interrupted; the same command goes on from the last checkpoints\n")
    except BrokenPipeError:  # Python would complain once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except RepulsiveError as error:
        parser.exit(2, f"{error}\n")
