"""Build the paper's GLUE table from run folders: a row per system, a column per task, and the mean over tasks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from repulsive.errors import RunError
from repulsive.lab.engine.files import read_json
from repulsive.lab.engine.run_reader import RECIPE, RUN
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.tables import Cell, cell
from repulsive.lab.systems.glue.data import TASKS, task_named
from repulsive.safety.markdown import format_table

FROM_RUN = "rte+mnli"  # RTE after training on another task of the benchmark
COLUMNS = (*TASKS, FROM_RUN)


@dataclass(frozen=True)
class System:
    """Results of one system, a row of the table.

    Args:
        name: name of the system in the table.
        cells: column -> mean and standard deviation over seeds of the task's own metric, times 100.
        seeds: column -> number of seeds.
    """

    name: str
    cells: dict[str, Cell]
    seeds: dict[str, int]

    def average(self, intermediate: bool = False) -> float | None:
        """Compute the mean over the eight tasks; None if a task is missing.

        Args:
            intermediate: use RTE after training on another task.
        """
        wanted = [FROM_RUN if name == "rte" and intermediate else name for name in TASKS]
        if any(name not in self.cells for name in wanted):
            return None
        return statistics.fmean(self.cells[name].mean for name in wanted)


def system(name: str, folder: Path, part: str = "test") -> System:
    """Collect all finished GLUE runs below a folder.

    Args:
        name: name of the system in the table.
        folder: folder with run folders, such as `--out` of `repulsive train`.
        part: data split on which the runs were evaluated.

    Raises:
        RunError: there are no such runs, or two runs have the same task and seed.
    """
    collected = system_of(name, sorted(path.parent for path in folder.rglob(RECIPE)), part)
    if not collected.cells:
        raise RunError(f"{folder}: holds no finished run of GLUE; `repulsive ls` lists runs")
    return collected


def system_of(name: str, paths: Iterable[Path], part: str = "test") -> System:
    """Collect the finished GLUE runs among some folders; unlike `system`, accept folders without any such run."""
    columns: dict[str, dict[int, tuple[Path, float]]] = {}
    for path in paths:
        run = RunFolder(path)
        if run.recipe.get("task") != "glue" or run.result is None:
            continue
        column, seed = _column(run), int(run.recipe["seed"])
        seeds = columns.setdefault(column, {})
        if seed in seeds:
            other = seeds[seed][0]
            raise RunError(f"{path}: is {column}, seed {seed}, and so is {other}; give each system its own --out")
        metric = task_named(run.recipe["data"]["task"]).metric
        seeds[seed] = path, 100 * run.metrics(part)[metric]
    cells = {column: cell([value for _, value in seeds.values()]) for column, seeds in columns.items()}
    return System(name, cells, {column: len(seeds) for column, seeds in columns.items()})


def as_markdown(systems: Sequence[System], counted: str = "seeds") -> str:
    """Format the table in Markdown; a mean is shown only if a system has all eight tasks.

    Args:
        systems: the rows.
        counted: title of the last column, which has the number of runs.
    """
    shown = [column for column in COLUMNS if any(column in each.cells for each in systems)]
    means: Mapping[str, bool] = {"mean": False} | ({"mean, RTE from MNLI": True} if FROM_RUN in shown else {})
    head = ["system", *map(title, shown), *means, counted]
    rows = []
    for each in systems:
        cells = [_format_cell(each.cells[column]) if column in each.cells else "" for column in shown]
        averages = [each.average(intermediate) for intermediate in means.values()]
        count = sorted(set(each.seeds.values()))
        seeds = str(count[0]) if len(count) == 1 else f"{count[0]}-{count[-1]}"
        formatted = ["" if mean is None else f"{mean:.1f}" for mean in averages]
        rows.append([each.name, *cells, *formatted, seeds])
    return format_table(head, rows)


def _column(run: RunFolder) -> str:
    task = task_named(run.recipe["data"]["task"]).name
    facts = read_json(run.path / RUN) or {}
    from_run = any(name.startswith("start/best/") for name in facts.get("data", {}))
    return FROM_RUN if task == "rte" and from_run else task


def title(column: str) -> str:
    """Return the title of a column."""
    return "RTE from MNLI" if column == FROM_RUN else TASKS[column].folder


def _format_cell(value: Cell) -> str:
    return f"{value.mean:.1f}" if math.isnan(value.deviation) else f"{value.mean:.1f} ± {value.deviation:.1f}"
