"""Sentence classification measured: tune every method on the development set, then train it with several seeds.

    python benchmarks/classification.py --data prepared --out runs/study --results results/classification

Every method, the baseline first, has a grid of its own around the baseline's tuned settings. Settings are chosen by
mean accuracy on the development set over the tuning seeds, equal ones by its likelihood. The test set is looked at
once, for the runs of the tables. What has been trained is not trained again: stages can be repeated and resumed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from repulsive.errors import RunError
from repulsive.recipes import make_task, names
from repulsive.recipes.plan import folder_name, plan
from repulsive.training.launch import Spec, train_many
from repulsive.training.runs import RUN, RunFolder, read_json
from repulsive.training.tables import as_markdown, rows, runs_in

Grid = dict[str, Sequence[Any]]
BASELINE = "ma"
GRIDS: dict[str, list[Grid]] = {  # of every method: one or more grids, all points of which are tried
    "ma": [{"optimizer.lr": (1e-3, 2e-3, 4e-3), "model.dropout": (0.3, 0.5)}],
    "frobenius": [{"method.penalty": (0.001, 0.01, 0.03, 0.1, 0.3)}],
    "svgd": [{"method.ratio": (0.1, 0.3, 1.0)}, {"method.alpha": (0.1, 1.0)}],
    "spos": [{"method.beta": (1e4, 1e5, 1e6)}],  # alpha as SVGD's, as the paper does
    "sgld": [{"method.temperature": (1e-12, 1e-10, 1e-8)}],
    "gaussian": [{"method.prior_std": (0.1, 1.0)}],
    "cosine-regulariser": [{"method.alpha": (0.01, 0.1)}],
    "cosine-derivative": [{"method.alpha": (0.01, 0.1)}],
    "cosine-smoothing": [{"method.alpha": (0.01, 0.1)}],
    "svgd-sphere": [{"method.ratio": (0.3, 1.0)}],
    "ma-own": [{"model.hidden": (20, 50)}],
    "svgd-own": [{"model.hidden": (20, 50), "method.ratio": (0.1, 0.3)}],
    "control-scaled": [{}],
    "control-smoothed": [{}],
}
SMALL: list[Grid] = [{"optimizer.lr": (2e-3, 4e-3, 8e-3), "model.dropout": (0.1, 0.3)}]
BASELINES = {"reviews": SMALL}  # where the baseline's grid is another
EXPLORED = ("svgd-sphere", "ma-own", "svgd-own")  # tried on the development set of Yelp, not in the tables
FOLLOWS = {"spos": "svgd", "gaussian": "svgd"}  # these start from another method's tuned settings


def points(grids: Sequence[Grid]) -> Iterator[tuple[str, ...]]:
    """`key=value` changes of every point."""
    for grid in grids:
        for values in itertools.product(*grid.values()):
            yield tuple(f"{key}={json.dumps(value)}" for key, value in zip(grid, values, strict=True))


class Study:
    """All runs of one task.

    Args:
        task: its name, a folder of recipes.
        arguments: of the command line.
    """

    def __init__(self, task: str, arguments: argparse.Namespace) -> None:
        self.task = task
        self.data = f"data.folder={(arguments.data / task).resolve()}"
        self.out = arguments.out / task
        self.device = arguments.device
        self.common = [self.data, *arguments.set]
        self.chosen: dict[str, tuple[str, ...]] = {}
        self.methods = [name for name in arguments.methods if f"{task}/{name}" in names()]
        if task != "yelp":
            self.methods = [name for name in self.methods if name not in EXPLORED]

    def grid(self, method: str) -> list[tuple[str, ...]]:
        """The changes of every point of a method's grid, those it builds on included."""
        grids = BASELINES.get(self.task, GRIDS[method]) if method == BASELINE else GRIDS[method]
        start = self.chosen.get(BASELINE, ()) + (self.chosen[FOLLOWS[method]] if method in FOLLOWS else ())
        start = tuple(dict.fromkeys(start))
        return [start + point for point in points(grids)]

    def specs(self, method: str, changes: Sequence[str], seeds: range, stage: str) -> list[Spec]:
        found = []
        for seed in seeds:
            (spec,) = plan([f"{self.task}/{method}"], [*self.common, *changes], seed=seed, device=self.device)
            folder = self.out / stage / folder_name(method, changes) / f"seed-{seed}"
            found.append(dataclasses.replace(spec, folder=folder))
        return found

    def choose(self, method: str, seeds: range) -> dict[str, Any]:
        """Pick the point that does best on the development set."""
        table = []
        for changes in self.grid(method):
            results = [RunFolder(spec.folder).result for spec in self.specs(method, changes, seeds, "tune")]
            dev = [result["dev"] for result in results if result is not None]
            if dev:
                means = {name: round(statistics.fmean(d[name] for d in dev if name in d), 6) for name in dev[0]}
                table.append({"changes": list(changes), "seeds": len(dev), "dev": means})
        if not table:
            self.methods.remove(method)
            return {"chosen": None, "tried": []}
        best = max(table, key=lambda row: (row["dev"]["accuracy"], -row["dev"]["nll"]))
        self.chosen[method] = tuple(best["changes"])
        return {"chosen": best["changes"], "tried": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["yelp", "age", "snli"])
    parser.add_argument("--methods", nargs="+", default=list(GRIDS), choices=list(GRIDS))
    parser.add_argument("--data", type=Path, default=Path("prepared"))
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    parser.add_argument("--results", type=Path, default=Path("results/classification"))
    parser.add_argument("--tuning-seeds", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=6, help="of the tables; other seeds than those tuned with")
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--device")
    parser.add_argument("--set", action="append", default=[], help="key=value, for every run")
    parser.add_argument("--until", choices=["baseline", "methods", "runs", "tables"], default="tables")
    arguments = parser.parse_args()
    studies = [Study(task, arguments) for task in arguments.tasks]
    tuning, final = range(100, 100 + arguments.tuning_seeds), range(arguments.seeds)
    tuned: dict[str, dict[str, Any]] = {study.task: {} for study in studies}

    def tune(methods: Sequence[str]) -> None:
        specs = [
            spec
            for study in studies
            for method in methods
            if method in study.methods
            for changes in study.grid(method)
            for spec in study.specs(method, changes, tuning, "tune")
        ]
        run(specs, f"tuning {', '.join(methods)}", arguments.jobs)
        for study in studies:
            for method in [name for name in methods if name in study.methods]:
                tuned[study.task][method] = study.choose(method, tuning)
        save(arguments.results / "tuned.json", tuned)

    tune([BASELINE])
    if arguments.until == "baseline":
        return
    followers = [method for method in arguments.methods if method in FOLLOWS]
    tune([method for method in arguments.methods if method not in (BASELINE, *followers)])
    if followers:
        tune(followers)
    if arguments.until == "methods":
        return
    for study in studies:
        methods = [name for name in study.methods if name not in EXPLORED]
        specs = [spec for name in methods for spec in study.specs(name, study.chosen[name], final, "final")]
        run(specs, f"table of {study.task}", arguments.jobs)
        if arguments.until == "tables":
            write_table(study, methods, arguments)


def run(specs: Sequence[Spec], title: str, jobs: int) -> None:
    started = time.monotonic()
    left = [spec for spec in specs if RunFolder(spec.folder).result is None]
    print(f"{title}: {len(specs)} runs, {len(left)} to do", flush=True)
    if left:
        order = sorted(left, key=lambda spec: "yelp" not in str(spec.folder))  # the longest first
        try:
            train_many(order, make_task, jobs, lambda spec, how: None if how == "done" else print(spec.folder, how))
        except RunError as error:  # a point of a grid may diverge
            print(error, flush=True)
    print(f"{title}: {time.monotonic() - started:.0f} s", flush=True)


def write_table(study: Study, methods: Sequence[str], arguments: argparse.Namespace) -> None:
    final = study.out / "final"
    folders = [final / folder_name(method, study.chosen[method]) for method in methods]
    folders = [folder for folder in folders if runs_in(folder)]
    found = rows(folders)
    text = as_markdown(found)
    print(f"\n{study.task}\n{text}", flush=True)
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / f"{study.task}.md").write_text(text + "\n")
    runs = [run for folder in folders for run in runs_in(folder).values() if run.result]
    seconds = [run.result["seconds"] for run in runs]
    table = {
        **{key: read_json(runs[0].path / RUN)["started"][key] for key in ("device", "versions")},
        "seconds_a_run": statistics.median(seconds),
        "rows": [dataclasses.asdict(row) | {"folder": row.folder.name} for row in found],
    }
    save(arguments.results / f"{study.task}.json", table)


def save(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
