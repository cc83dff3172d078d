"""The runs of the graph-to-text study on one dataset: rows of each stage, and choices from the results so far."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studies.engine import Study, dev_results, is_finished, points
from studies.graphs.rows import BASELINE, CONTROLS, GRIDS, LABELS, OURS, PUBLISHED, SCALES, Row

from repulsive.lab.engine.config import as_tables
from repulsive.lab.engine.launch import Spec
from repulsive.lab.engine.recipe_tables import differences

STAGES = ("tune", "final")
Changes = tuple[str, ...]


class Graphs(Study):
    """All runs on one dataset. Choices are computed from the results that exist.

    Args:
        task: name of the dataset, which is also a folder of recipes.
        arguments: of the command line.
    """

    def __init__(self, task: str, arguments: argparse.Namespace) -> None:
        self.scale = scale = SCALES[arguments.scale]
        self.data = arguments.data / task  # not resolved: it has another path on other machines
        common = [f"data.folder={self.data}", *scale.common, *scale.tasks.get(task, ()), *arguments.set]
        super().__init__(task, arguments.out / task, common, arguments.device)
        self.methods = [method for method in LABELS if method in (BASELINE, *arguments.methods)]
        tuning = range(100, 100 + arguments.tuning_seeds)
        self.seeds = {"tune": tuning, "final": range(arguments.seeds)}
        self.is_plan = arguments.dry_run  # assume that the first point of an unfinished grid is chosen
        self._specs: dict[tuple[Path, range], list[Spec]] = {}

    def rows(self, stage: str) -> list[Row]:
        """The rows of a stage that the results so far determine."""
        if stage == "tune":
            grids = [self.grid(method) for method in self.methods]
            return [row for grid in grids if len(grid) > 1 for row in grid]  # one point needs no tuning
        chosen = {method: self.chosen(method) for method in self.methods}
        rows = [Row(LABELS[method], method, changes) for method, changes in chosen.items() if changes is not None]
        base = chosen[BASELINE]
        if OURS in self.methods and base is not None:
            published = Row(PUBLISHED.label, OURS, (*base, *PUBLISHED.changes))
            if all(differences(self._recipe(published), self._recipe(row)) for row in rows):
                rows.append(published)
        return rows

    def runs(self, row: Row, stage: str) -> list[Spec]:
        """The runs of a row."""
        folder, seeds = self.row_folder(row, stage), self.seeds[stage]
        if (folder, seeds) not in self._specs:
            extra = self.scale.dev if stage == "tune" else ()
            specs = self.specs(row.method, (*extra, *row.changes), seeds, stage)
            self._specs[folder, seeds] = [dataclasses.replace(s, folder=folder / s.folder.name) for s in specs]
        return self._specs[folder, seeds]

    def row_folder(self, row: Row, stage: str = "final") -> Path:
        """The folder of all seeds of a row."""
        return self.folder(row.method, row.changes, stage)

    def required_runs(self, stage: str) -> dict[Path, Spec]:
        """Folder -> run, of all runs of a stage that the results so far determine."""
        return {spec.folder: spec for row in self.rows(stage) for spec in self.runs(row, stage)}

    def grid(self, method: str) -> list[Row]:
        """The points of a method's grid; empty until the settings it starts from are chosen."""
        start = self._start(method)
        if start is None:
            return []
        rows = [Row(LABELS[method], method, (*start, *point)) for point in points(GRIDS[self.task][method])]
        return rows[: self.scale.most]

    def chosen(self, method: str) -> Changes | None:
        """The point of a method's grid with the lowest NLL; None until all points have finished."""
        grid = self.grid(method)
        if len(grid) == 1 or (grid and self.is_plan and not self._all_finished(grid)):
            return grid[0].changes
        if not grid or not self._all_finished(grid):
            return None
        results = [(row, dev_results({(): self.runs(row, "tune")})) for row in grid]
        scores = [(result[0]["dev"]["nll"], row.changes) for row, result in results if result]
        return min(scores)[1] if scores else None  # None if all points diverged

    def _start(self, method: str) -> Changes | None:
        """Settings a method's grid starts from: the baseline's and, for a control, the stepsize chosen for ours."""
        base = () if method == BASELINE else self.chosen(BASELINE)
        if base is None or method not in CONTROLS or OURS not in self.methods:
            return base
        ours = self.chosen(OURS)
        return None if ours is None else (*base, *(c for c in ours if c.startswith("method.stepsize=")))

    def _all_finished(self, rows: Sequence[Row]) -> bool:
        return all(is_finished(spec) for row in rows for spec in self.runs(row, "tune"))

    def _recipe(self, row: Row) -> dict[str, Any]:
        """Tables of the recipe of a row; rows with equal recipes are the same training."""
        return as_tables(self.runs(row, "final")[0].recipe)
