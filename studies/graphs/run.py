"""Graphs to text measured: what repulsion does to GraphWriter, every method tuned, tables over seeds.

    python -m studies.graphs.run --dry-run
    python -m studies.graphs.run --stage tune final --tasks webnlg --data prepared --jobs 8 --limit 540 --drop-weights
    python -m studies.graphs.run --stage tables --tasks webnlg --data prepared --results results/graphs

Stages: `tune` gives every method a grid of its own, the baseline first, the others from its settings; `final` trains
what was chosen, and the rule as published, with other seeds; `tables` writes what there is. A machine that trains need
not have METEOR: runs keep what they wrote, and `tables` scores it where Java and pycocoevalcap are.

Settings are chosen by the NLL of a word of the development set, mean over the tuning seeds. What has been trained is
not trained again: the same command goes on where `--limit` stopped it.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from studies.engine import Study, common_arguments, ended, in_one_line, points, tried, work
from studies.graphs.rows import BASELINE, CONTROLS, GRIDS, LABELS, OURS, PUBLISHED, SCALES, TASKS, Row
from studies.graphs.tables import write_tables

from repulsive.errors import DataError
from repulsive.lab.engine.launch import Spec
from repulsive.lab.text.folders import read_manifest

STAGES = ("tune", "final")
Changes = tuple[str, ...]


class Graphs(Study):
    """All runs on one data set. What is chosen is a function of the results that are there.

    Args:
        task: its name, a folder of recipes.
        arguments: of the command line.
    """

    def __init__(self, task: str, arguments: argparse.Namespace) -> None:
        self.scale = scale = SCALES[arguments.scale]
        self.data = arguments.data / task  # as it is given, not resolved: another machine has it elsewhere
        common = [f"data.folder={self.data}", *scale.common, *scale.tasks.get(task, ()), *arguments.set]
        super().__init__(task, arguments.out / task, common, arguments.device)
        self.methods = [method for method in LABELS if method in (BASELINE, *arguments.methods)]
        tuning = range(100, 100 + arguments.tuning_seeds)
        self.seeds = {"tune": tuning, "final": range(arguments.seeds)}
        self.guess = arguments.dry_run  # take the first point for chosen where nothing has been
        self._specs: dict[tuple[Path, range], list[Spec]] = {}

    def rows(self, stage: str) -> list[Row]:
        """The rows of a stage that are known by now."""
        if stage == "tune":
            grids = [self.grid(method) for method in self.methods]
            return [row for grid in grids if len(grid) > 1 for row in grid]  # of one point there is nothing to choose
        chosen = {method: self.chosen(method) for method in self.methods}
        found = [Row(LABELS[method], method, changes) for method, changes in chosen.items() if changes is not None]
        base = chosen[BASELINE]
        if OURS in self.methods and base is not None:
            published = Row(PUBLISHED.label, OURS, (*base, *PUBLISHED.changes))
            if all(self._recipe(published) != self._recipe(row) for row in found):
                found.append(published)
        return found

    def runs(self, row: Row, stage: str) -> list[Spec]:
        """The runs of a row."""
        place, seeds = self.place(row, stage), self.seeds[stage]
        if (place, seeds) not in self._specs:
            extra = self.scale.dev if stage == "tune" else ()
            specs = self.specs(row.method, (*extra, *row.changes), seeds, stage)
            self._specs[place, seeds] = [dataclasses.replace(s, folder=place / s.folder.name) for s in specs]
        return self._specs[place, seeds]

    def place(self, row: Row, stage: str = "final") -> Path:
        """Where the runs of a row are, all seeds."""
        return self.folder(row.method, row.changes, stage)

    def needed(self, stage: str) -> dict[Path, Spec]:
        """All runs of a stage that are known by now."""
        return {spec.folder: spec for row in self.rows(stage) for spec in self.runs(row, stage)}

    def grid(self, method: str) -> list[Row]:
        """The points of a method's grid; none while what it builds on has not been chosen."""
        start = self._start(method)
        if start is None:
            return []
        found = [Row(LABELS[method], method, (*start, *point)) for point in points(GRIDS[self.task][method])]
        return found[: self.scale.most]

    def chosen(self, method: str) -> Changes | None:
        """The point of a method's grid with the least NLL; None while it has not been tried whole."""
        grid = self.grid(method)
        if len(grid) == 1 or (grid and self.guess and not self._ended(grid)):
            return grid[0].changes
        if not grid or not self._ended(grid):
            return None
        known = [(seen[0]["dev"]["nll"], row.changes) for row in grid if (seen := tried({(): self.runs(row, "tune")}))]
        return min(known)[1] if known else None  # none: all points have diverged

    def _start(self, method: str) -> Changes | None:
        """What a method's grid builds on: the baseline's settings, and of a control the stepsize that ours took."""
        base = () if method == BASELINE else self.chosen(BASELINE)
        if base is None or method not in CONTROLS or OURS not in self.methods:
            return base
        ours = self.chosen(OURS)
        return None if ours is None else (*base, *(c for c in ours if c.startswith("method.stepsize=")))

    def _ended(self, rows: Sequence[Row]) -> bool:
        return all(ended(spec) for row in rows for spec in self.runs(row, "tune"))

    def _recipe(self, row: Row) -> object:
        """What two rows have in common if they are the same training."""
        return self.runs(row, "final")[0].recipe


def check_data(study: Graphs) -> None:
    """Raise if nothing can be chosen on the development set because the model is trained on it."""
    files = read_manifest(study.data)["files"]
    if files["train.safetensors"] == files["dev.safetensors"]:
        raise DataError(f"{study.data}: train and dev are the same graphs; prepare data whose parts differ")


def show_plan(studies: Sequence[Graphs], stages: Sequence[str]) -> None:
    """Runs and epochs of every stage; where nothing has been chosen yet the first point of a grid stands for it."""
    print(f"{'stage':8}{'data':10}{'rows':>6}{'runs':>6}{'to do':>7}{'epochs':>8}")
    for stage in stages:
        for study in studies:
            specs = list(study.needed(stage).values())
            if not specs:
                continue
            left, epochs = sum(not ended(spec) for spec in specs), specs[0].recipe.training.epochs
            print(f"{stage:8}{study.task:10}{len(study.rows(stage)):6}{len(specs):6}{left:7}{epochs:8}")


def main(words: Sequence[str] | None = None) -> None:
    parser = common_arguments("graphs", __doc__, STAGES, list(SCALES))
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--methods", nargs="+", default=list(LABELS), choices=list(LABELS))
    arguments = parser.parse_args(words)
    stages = [stage for stage in STAGES if stage in arguments.stage]
    with in_one_line(parser):
        studies = [Graphs(task, arguments) for task in arguments.tasks]
        if arguments.dry_run:
            show_plan(studies, stages)
            return
        for study in studies if stages else ():
            check_data(study)
        work(studies, stages, arguments)
        if "tables" in arguments.stage:
            write_tables(studies, arguments.results)


if __name__ == "__main__":
    main()
