"""The runs of the translation study on one dataset: rows of each stage, and choices from the results so far."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from studies.engine import Study, dev_results, is_finished, points
from studies.translation.rows import (
    ABLATION,
    BASELINE,
    DECAYED,
    FOLLOWS,
    GRIDS,
    LABELS,
    MAIN_TASK,
    OURS,
    PREFIX,
    PUBLISHED,
    QUESTION,
    SCALES,
    Row,
)

from repulsive.lab.engine.config import as_tables
from repulsive.lab.engine.launch import Spec
from repulsive.lab.engine.recipe_tables import differences, flatten
from repulsive.lab.systems.registry import open_recipe

STAGES = ("question", "tune", "final", "ablation", "heads", "redundancy")
DEV_STAGES = ("question", "tune")  # use the development set alone, with the tuning seeds
TUNED_STAGES = ("ablation", "heads", "redundancy")  # train tuned settings, and tune nothing themselves
TUNED = "tuned.json"  # in the folder of results
KEPT = "kept"  # folder of runs that keep their weights
Changes = tuple[str, ...]
_PLAIN = Row(LABELS[BASELINE], BASELINE)


class Translation(Study):
    """All runs on one dataset. Choices are computed from the results that exist.

    If only stages of `TUNED_STAGES` are asked for, choices that are in the stored table are used as they are.

    Args:
        task: name of the dataset, which is also a folder of recipes.
        arguments: of the command line.
        main: the study of `MAIN_TASK`; None if this is it.
    """

    def __init__(self, task: str, arguments: argparse.Namespace, main: Translation | None = None) -> None:
        self.scale = scale = SCALES[arguments.scale]
        # The data folder is not resolved: it has another path on other machines.
        common = [f"data.folder={arguments.data / task}", *scale.common, *scale.tasks[task], *arguments.set]
        super().__init__(task, arguments.out / task, common, arguments.device)
        self.data = arguments.data / task
        self.main = main or self
        self.transfers = arguments.transfer and main is not None
        self.methods = [method for method in LABELS if method in (BASELINE, *arguments.methods)]
        tuning = range(100, 100 + arguments.tuning_seeds)
        more = range(arguments.more_seeds)
        final = range(arguments.seeds)
        self.seeds = dict(zip(STAGES, (tuning, tuning, final, more, more, final), strict=True))
        self.is_plan = arguments.dry_run  # assume that the first point of an unfinished grid is chosen
        self.stored = stored_choices(arguments.results / TUNED, task, arguments.stage)
        self._chosen: dict[str, Changes] = dict(self.stored)
        self._normalised: dict[tuple[str, Changes], Changes] = {}
        self._specs: dict[tuple[Path, range], list[Spec]] = {}

    # -- rows and runs --------------------------------------------------------------------------------------------

    def rows(self, stage: str) -> list[Row]:
        """The rows of a stage that the results so far determine."""
        if stage not in ("tune", "final") and self.task != MAIN_TASK:
            return []
        if stage != "tune" and self.chosen(BASELINE) is None:
            return []
        rows = {
            "question": self._question,
            "tune": self._tune,
            "final": self._final,
            "ablation": self._ablation,
            "heads": self._heads,
            "redundancy": self._redundancy,
        }
        return rows[stage]()

    def required_runs(self, stage: str) -> dict[Path, Spec]:
        """Folder -> run, of all runs of a stage that the results so far determine, preceded by those of its grids."""
        if stage not in ("tune", "final") and self.task != MAIN_TASK:
            return {}
        published = dict.fromkeys(("question", "ablation", "heads"), (BASELINE,))  # the rule itself is not tuned
        tuned = published | {"redundancy": (BASELINE, OURS)}
        methods = [method for method in self.methods if method in tuned.get(stage, self.methods)]
        needed = {*methods, *(FOLLOWS[method] for method in methods if method in FOLLOWS)}
        grids = [row for method in LABELS if method in needed for row in self._grid_to_tune(method)]
        wanted = [(row, "tune") for row in grids] + [(row, stage) for row in self.rows(stage)]
        return {spec.folder: spec for row, of_stage in wanted for spec in self.runs(row, of_stage)}

    def row_folder(self, row: Row, stage: str) -> Path:
        """The folder of all seeds of a row; rows with equal settings share it, whatever the order of their changes."""
        folder = "dev" if stage in DEV_STAGES else KEPT if stage == "redundancy" else "final"
        return self.folder(row.method, self._normalise(row), folder)

    def runs(self, row: Row, stage: str) -> list[Spec]:
        """The runs of a row."""
        folder, seeds = self.row_folder(row, stage), self.seeds[stage]
        if (folder, seeds) not in self._specs:
            extra = self.scale.dev if stage in DEV_STAGES else ()
            specs = self.specs(row.method, (*extra, *self._normalise(row)), seeds, "")
            moved = [dataclasses.replace(spec, folder=folder / spec.folder.name) for spec in specs]
            self._specs[folder, seeds] = moved
        return self._specs[folder, seeds]

    def recipe(self, method: str) -> str:
        return f"{self.task}/{PREFIX.get(self.task, '')}{method}"

    def _normalise(self, row: Row) -> Changes:
        """Changes in one order, each key once, without those that equal the recipe."""
        if (key := (row.method, row.changes)) not in self._normalised:
            recipe = self.recipe(row.method)
            plain, changed = (as_tables(open_recipe(recipe, [*self.common, *some])) for some in ((), row.changes))
            values = flatten(changed)
            own = tuple(f"{name}={json.dumps(values[name])}" for name in differences(plain, changed))
            self._normalised[key] = own
        return self._normalised[key]

    # -- choices --------------------------------------------------------------------------------------------------

    def grid(self, method: str) -> list[Row]:
        """The points of a method's grid; empty until the settings it starts from are chosen."""
        start = () if method == BASELINE else self.chosen(FOLLOWS.get(method, BASELINE))
        if start is None:
            return []
        if self.transfers and method != BASELINE:
            transferred = self.main.chosen(method)
            own = [change for change in transferred or () if change.startswith("method.")]
            return [] if transferred is None else [Row(LABELS[method], method, (*start, *own))]
        rows = [Row(LABELS[method], method, (*start, *point)) for point in points(GRIDS[self.task][method])]
        return rows[: self.scale.most]

    def chosen(self, method: str) -> Changes | None:
        """The point of a method's grid with the lowest NLL; None until all points have finished."""
        if method not in self._chosen:
            grid = self.grid(method)
            if len(grid) == 1:
                return grid[0].changes
            if not grid or not self.all_finished(grid, "tune"):
                return grid[0].changes if grid and self.is_plan else None
            best = self.best(grid, "tune")
            if best is None:
                return None  # all points diverged
            self._chosen[method] = best.changes
        return self._chosen[method]

    def best_rule(self) -> Row | None:
        """The row of the stage `question` with the lowest NLL among those that change SVGD alone; None until then."""
        main = self.main
        rows = main.rows("question")
        if not rows or not main.all_finished(rows, "question"):
            return QUESTION[4] if self.is_plan else None
        by_label = {row.label: row for row in QUESTION}
        rules = [
            row
            for row in rows
            if row.method == OURS and all(change.startswith("method.") for change in by_label[row.label].changes)
        ]
        best = main.best(rules, "question")
        return best and by_label[best.label]

    def all_finished(self, rows: Sequence[Row], stage: str) -> bool:
        """Whether all runs of some rows have finished."""
        return all(is_finished(spec) for row in rows for spec in self.runs(row, stage))

    def best(self, rows: Sequence[Row], stage: str) -> Row | None:
        """The row with the lowest NLL on the development set; None if none has a result."""
        scores = [(point[0]["dev"]["nll"], row) for row in rows if (point := dev_results({(): self.runs(row, stage)}))]
        return min(scores, key=lambda each: each[0])[1] if scores else None

    def _grid_to_tune(self, method: str) -> list[Row]:
        """A grid; empty if it has only one point, or if the choice is stored."""
        if method in self.stored:
            return []
        grid = self.grid(method)
        return grid if len(grid) > 1 else []

    # -- the rows of each stage -----------------------------------------------------------------------------------

    def _question(self) -> list[Row]:
        return [self._on_baseline(row) for row in QUESTION[: self.scale.most]]

    def _tune(self) -> list[Row]:
        return [row for method in self.methods for row in self._grid_to_tune(method)]

    def _final(self) -> list[Row]:
        chosen = {method: self.chosen(method) for method in self.methods}
        rows = [Row(LABELS[method], method, changes) for method, changes in chosen.items() if changes is not None]
        extra = [PUBLISHED, self.best_rule()] if OURS in self.methods else []
        if self is self.main:
            extra += [DECAYED, *_with_decay(extra[-1:])]
        distinct: dict[Path, Row] = {}  # of rows with equal settings, the first
        for row in [*rows, *(self._on_baseline(row) for row in extra if row is not None)]:
            distinct.setdefault(self.row_folder(row, "final"), row)
        return list(distinct.values())

    def _ablation(self) -> list[Row]:
        """The paper's claims are about its own rule, so these rows and those of `_heads` use it, not the tuned one."""
        rows = [Row(label, OURS, (*PUBLISHED.changes, *changes)) for label, changes in ABLATION.items()]
        return [self._on_baseline(row) for row in (_PLAIN, *rows[: self.scale.most])]

    def _heads(self) -> list[Row]:
        return [
            self._on_baseline(dataclasses.replace(row, changes=(*row.changes, f"model.heads={count}")))
            for count in self.scale.heads
            for row in (_PLAIN, PUBLISHED)
        ]

    def _redundancy(self) -> list[Row]:
        chosen = {method: self.chosen(method) for method in (BASELINE, OURS) if method in self.methods}
        rows = [Row(LABELS[method], method, changes) for method, changes in chosen.items() if changes is not None]
        return [*rows, self._on_baseline(PUBLISHED)]

    def _on_baseline(self, row: Row) -> Row:
        """A row with the tuned settings of the baseline."""
        return dataclasses.replace(row, changes=(*(self.chosen(BASELINE) or ()), *row.changes))


def stored_choices(path: Path, task: str, stages: Sequence[str]) -> dict[str, Changes]:
    """Read method -> chosen settings from an earlier table; empty if other stages than `TUNED_STAGES` are asked for."""
    wanted = {stage for stage in stages if stage != "tables"}
    if not wanted or not wanted <= set(TUNED_STAGES) or not path.is_file():
        return {}
    table = json.loads(path.read_text()).get(task, {})
    return {method: tuple(entry["chosen"]) for method, entry in table.items() if entry["chosen"] is not None}


def _with_decay(rows: Sequence[Row | None]) -> list[Row]:
    """Rows with the weight decay that the stage `question` tries."""
    return [
        Row(f"{row.label}, weight decay 0.3", row.method, (*row.changes, *DECAYED.changes), DECAYED.label)
        for row in rows
        if row is not None
    ]
