"""Translation measured: what repulsion does to a Transformer, every method tuned, tables over seeds.

    python -m studies.translation.run --dry-run
    python -m studies.translation.run --stage question tune --data prepared --jobs 12 --limit 540
    python -m studies.translation.run --stage tables --results results/translation

Stages: `question` asks on Multi30k why the published rule slows a Transformer down, and what pays; `tune` gives every
method a grid of its own; `final` trains what was chosen with other seeds; `ablation` is the paper's table of attention
modules, `heads` the curve over their number; `redundancy` trains plain attention, ours and the published rule once
more, keeps the weights and takes heads away; `tables` writes what there is.

Settings are chosen by the NLL of a piece of the development set, mean over the tuning seeds. A stage also trains the
grids that it builds on. Equal settings are one run, whichever stages ask for it, and what has been trained is not
trained again: the same command goes on where `--limit` stopped it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from studies.engine import Study, common_arguments, ended, flat, in_one_line, points, tried, work
from studies.translation.rows import (
    ABLATION,
    ASKED,
    BASELINE,
    DECAYED,
    FOLLOWS,
    GRIDS,
    LABELS,
    OURS,
    PREFIX,
    PUBLISHED,
    QUESTION,
    SCALES,
    TASKS,
    Row,
)
from studies.translation.watched_heads import make_task

from repulsive.lab.engine.launch import Spec
from repulsive.lab.systems.registry import open_recipe

STAGES = ("question", "tune", "final", "ablation", "heads", "redundancy")
EXPLORING = ("question", "tune")  # looks at the development set alone, with the tuning seeds
KEPT = "kept"  # folder of runs whose weights are looked at
Changes = tuple[str, ...]


class Translation(Study):
    """All runs on one data set. What is chosen is a function of the results that are there.

    Args:
        task: its name, a folder of recipes.
        arguments: of the command line.
        asked: the study of the data set the question is asked on; None: this one.
    """

    def __init__(self, task: str, arguments: argparse.Namespace, asked: Translation | None = None) -> None:
        self.scale = scale = SCALES[arguments.scale]
        # The folder as it is given, not resolved: another machine has it elsewhere.
        common = [f"data.folder={arguments.data / task}", *scale.common, *scale.tasks[task], *arguments.set]
        super().__init__(task, arguments.out / task, common, arguments.device)
        self.data = arguments.data / task
        self.asked = asked or self
        self.transfers = arguments.transfer and asked is not None
        self.methods = [method for method in LABELS if method in (BASELINE, *arguments.methods)]
        first = range(100, 100 + arguments.tuning_seeds)
        more = range(arguments.more_seeds)
        final = range(arguments.seeds)
        self.seeds = dict(zip(STAGES, (first, first, final, more, more, final), strict=True))
        self.guess = arguments.dry_run  # take the first point for chosen where nothing has been
        self._chosen: dict[str, Changes] = {}
        self._normal: dict[tuple[str, Changes], Changes] = {}
        self._specs: dict[tuple[Path, range], list[Spec]] = {}

    # -- rows and runs --------------------------------------------------------------------------------------------

    def rows(self, stage: str) -> list[Row]:
        """The rows of a stage that are known by now."""
        if stage not in ("tune", "final") and self.task != ASKED:
            return []
        if stage != "tune" and self.chosen(BASELINE) is None:
            return []
        found: list[Row] = getattr(self, f"_{stage}")()
        return found

    def needed(self, stage: str) -> dict[Path, Spec]:
        """All runs of a stage that are known by now, those of the grids it builds on first."""
        if stage not in ("tune", "final") and self.task != ASKED:
            return {}
        two = (BASELINE, OURS)
        base = {"question": (BASELINE,), "ablation": two, "heads": two, "redundancy": two}
        grids = [row for method in base.get(stage, self.methods) for row in self._tried(method)]
        wanted = [(row, "tune") for row in grids] + [(row, stage) for row in self.rows(stage)]
        return {spec.folder: spec for row, which in wanted for spec in self.runs(row, which)}

    def place(self, row: Row, stage: str) -> Path:
        """Where the runs of a row are, all seeds; equal settings have the same place, however they are written."""
        folder = "dev" if stage in EXPLORING else KEPT if stage == "redundancy" else "final"
        return self.folder(row.method, self._own(row), folder)

    def runs(self, row: Row, stage: str) -> list[Spec]:
        """The runs of a row."""
        place, seeds = self.place(row, stage), self.seeds[stage]
        if (place, seeds) not in self._specs:
            extra = self.scale.dev if stage in EXPLORING else ()
            specs = self.specs(row.method, (*extra, *self._own(row)), seeds, "")
            here = [dataclasses.replace(spec, folder=place / spec.folder.name) for spec in specs]
            self._specs[place, seeds] = here
        return self._specs[place, seeds]

    def recipe(self, method: str) -> str:
        return f"{self.task}/{PREFIX.get(self.task, '')}{method}"

    def _own(self, row: Row) -> Changes:
        """Changes in one order, each key once, those that change nothing left out."""
        if (key := (row.method, row.changes)) not in self._normal:
            recipe = self.recipe(row.method)
            plain, changed = (flat(open_recipe(recipe, [*self.common, *some])) for some in ((), row.changes))
            own = tuple(f"{name}={json.dumps(value)}" for name, value in changed.items() if value != plain[name])
            self._normal[key] = own
        return self._normal[key]

    # -- choices --------------------------------------------------------------------------------------------------

    def grid(self, method: str) -> list[Row]:
        """The points of a method's grid; none while what it builds on has not been chosen."""
        start = () if method == BASELINE else self.chosen(FOLLOWS.get(method, BASELINE))
        if start is None:
            return []
        if self.transfers and method != BASELINE:
            there = self.asked.chosen(method)
            own = [change for change in there or () if change.startswith("method.")]
            return [] if there is None else [Row(LABELS[method], method, (*start, *own))]
        found = [Row(LABELS[method], method, (*start, *point)) for point in points(GRIDS[self.task][method])]
        return found[: self.scale.most]

    def chosen(self, method: str) -> Changes | None:
        """The point of a method's grid with the least NLL; None while it has not been tried whole."""
        if method not in self._chosen:
            grid = self.grid(method)
            if len(grid) == 1:
                return grid[0].changes
            if not grid or not self.ended(grid, "tune"):
                return grid[0].changes if grid and self.guess else None
            best = self.best(grid, "tune")
            if best is None:
                return None  # all points have diverged
            self._chosen[method] = best.changes
        return self._chosen[method]

    def winner(self) -> Row | None:
        """Of the question's rows that change nothing but SVGD the one with the least NLL; None before they ended."""
        asked = self.asked
        rows = asked.rows("question")
        if not rows or not asked.ended(rows, "question"):
            return QUESTION[4] if self.guess else None
        own = {row.label: row for row in QUESTION}
        fit = [r for r in rows if r.method == OURS and all(c.startswith("method.") for c in own[r.label].changes)]
        best = asked.best(fit, "question")
        return best and own[best.label]

    def ended(self, rows: Sequence[Row], stage: str) -> bool:
        """Whether all runs of some rows have."""
        return all(ended(spec) for row in rows for spec in self.runs(row, stage))

    def best(self, rows: Sequence[Row], stage: str) -> Row | None:
        """The row with the least NLL on the development set; None where none has a result."""
        known = [(seen[0]["dev"]["nll"], row) for row in rows if (seen := tried({(): self.runs(row, stage)}))]
        return min(known, key=lambda each: each[0])[1] if known else None

    def _tried(self, method: str) -> list[Row]:
        """A grid, unless there is nothing to choose."""
        grid = self.grid(method)
        return grid if len(grid) > 1 else []

    # -- the rows of each stage -----------------------------------------------------------------------------------

    def _question(self) -> list[Row]:
        return [self._on_baseline(row) for row in QUESTION[: self.scale.most]]

    def _tune(self) -> list[Row]:
        return [row for method in self.methods for row in self._tried(method)]

    def _final(self) -> list[Row]:
        chosen = {method: self.chosen(method) for method in self.methods}
        found = [Row(LABELS[method], method, changes) for method, changes in chosen.items() if changes is not None]
        extra = [PUBLISHED, self.winner()] if OURS in self.methods else []
        if self is self.asked:
            extra += [DECAYED, *_decayed(extra[-1:])]
        first: dict[Path, Row] = {}  # of equal ones
        for row in [*found, *(self._on_baseline(row) for row in extra if row is not None)]:
            first.setdefault(self.place(row, "final"), row)
        return list(first.values())

    def _ablation(self) -> list[Row]:
        ours = self.chosen(OURS)
        if ours is None:
            return []
        rows = [Row(label, OURS, (*ours, *changes)) for label, changes in ABLATION.items()]
        return [self._on_baseline(Row(LABELS[BASELINE], BASELINE)), *rows[: self.scale.most]]

    def _heads(self) -> list[Row]:
        chosen = {method: self.chosen(method) for method in (BASELINE, OURS)}
        return [
            Row(LABELS[method], method, (*changes, f"model.heads={count}"))
            for count in self.scale.heads
            for method, changes in chosen.items()
            if changes is not None
        ]

    def _redundancy(self) -> list[Row]:
        chosen = {method: self.chosen(method) for method in (BASELINE, OURS)}
        rows = [Row(LABELS[method], method, changes) for method, changes in chosen.items() if changes is not None]
        return [*rows, self._on_baseline(PUBLISHED)]

    def _on_baseline(self, row: Row) -> Row:
        return dataclasses.replace(row, changes=(*(self.chosen(BASELINE) or ()), *row.changes))


def _decayed(rows: Sequence[Row | None]) -> list[Row]:
    """Rows with the weight decay that the question tries."""
    return [
        Row(f"{row.label}, weight decay 0.3", row.method, (*row.changes, *DECAYED.changes), DECAYED.label)
        for row in rows
        if row is not None
    ]


def show_plan(studies: Sequence[Translation], stages: Sequence[str]) -> None:
    """Runs and epochs of every stage; where nothing has been chosen yet the first point of a grid stands for it."""
    seen: set[Path] = set()
    total = 0.0
    print(f"{'stage':12}{'data':10}{'rows':>6}{'runs':>6}{'new':>6}{'to do':>7}{'epochs':>8}{'alone':>9}")
    for stage in stages:
        for study in (study for study in studies if study.needed(stage)):
            specs = study.needed(stage)
            new = [spec for folder, spec in specs.items() if folder not in seen]
            left = [spec for spec in new if not ended(spec)]
            epochs = next(iter(specs.values())).recipe.training.epochs
            seconds = len(left) * epochs * study.scale.seconds[study.task]
            seen, total = seen | set(specs), total + seconds
            counts = f"{len(study.rows(stage)):6}{len(specs):6}{len(new):6}{len(left):7}{epochs:8}{seconds:7.0f} s"
            print(f"{stage:12}{study.task:10}{counts}")
    print(f"One after the other, without translating: {total:.0f} s. Runs that a stage above has are not new.")


def main(words: Sequence[str] | None = None) -> None:
    parser = common_arguments("translation", __doc__, STAGES, list(SCALES))
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--methods", nargs="+", default=list(LABELS), choices=list(LABELS))
    parser.add_argument("--more-seeds", type=int, default=2, help="of ablation and heads, from 0 on")
    parser.add_argument(
        "--transfer", action="store_true", help=f"elsewhere only {LABELS[BASELINE]} is tuned; the rest as on {ASKED}"
    )
    arguments = parser.parse_args(words)
    stages = [stage for stage in STAGES if stage in arguments.stage]
    with in_one_line(parser):
        asked = Translation(ASKED, arguments)
        studies = [asked if task == ASKED else Translation(task, arguments, asked) for task in arguments.tasks]
        if arguments.dry_run:
            show_plan(studies, stages)
            return
        work(studies, stages, arguments, make_task, lambda spec: spec.folder.parents[1].name == KEPT)
        if "redundancy" in stages:
            from studies.translation.redundancy import measure_all

            measure_all(asked, drop=arguments.drop_weights)
        if "tables" in arguments.stage:
            from studies.translation.tables import write_tables

            write_tables(studies, arguments.results)


if __name__ == "__main__":
    main()
