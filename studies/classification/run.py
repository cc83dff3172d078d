"""Effect of repulsion on sentence classifiers: tune every method on the development set, then compare them over seeds.

    python -m studies.classification.run --data prepared --out runs/study --results results/classification

Needs prepared/yelp, prepared/age and prepared/snli (`repulsive prepare`). Writes tables and tuned settings to
results/classification.

The baseline is tuned first; every other method has its own grid around the baseline's tuned settings. Settings are
chosen by mean accuracy on the development set over the tuning seeds, and ties by NLL. The test set is used once, for
the tables. Finished runs are not repeated: rerun the same command to resume.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studies.engine import Grid, Study, dev_results, points, train_missing
from studies.output import rows_as_data, save, update_json

from repulsive.lab.engine.built_in import names
from repulsive.lab.engine.tables import as_markdown, rows, runs_in

BASELINE = "ma"
GRIDS: dict[str, list[Grid]] = {  # one or more grids for every method; all points are tried
    "ma": [{"optimizer.lr": (1e-3, 2e-3, 4e-3), "model.dropout": (0.3, 0.5)}],
    "frobenius": [{"method.penalty": (0.001, 0.01, 0.03, 0.1, 0.3)}],
    "svgd": [{"method.ratio": (0.1, 0.3, 1.0)}, {"method.alpha": (0.1, 1.0)}],
    "spos": [{"method.beta": (1e4, 1e5, 1e6)}],  # alpha is SVGD's, as in the paper
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
BASELINES = {"reviews": SMALL}  # datasets with another grid for the baseline
EXPLORED = ("svgd-sphere", "ma-own", "svgd-own")  # tried on the development set of Yelp, not in the tables
FOLLOWS = {"spos": "svgd", "gaussian": "svgd"}  # start from that method's tuned settings


class Classification(Study):
    """All runs on one dataset.

    Args:
        task: name of the dataset, which is also a folder of recipes.
        arguments: of the command line.
    """

    def __init__(self, task: str, arguments: argparse.Namespace) -> None:
        data = f"data.folder={(arguments.data / task).resolve()}"
        super().__init__(task, arguments.out / task, [data, *arguments.set], arguments.device)
        self.chosen: dict[str, tuple[str, ...]] = {}
        self.methods = [name for name in arguments.methods if f"{task}/{name}" in names()]
        if task != "yelp":
            self.methods = [name for name in self.methods if name not in EXPLORED]

    def grid(self, method: str) -> list[tuple[str, ...]]:
        """The changes of every point of a method's grid, including the settings it starts from."""
        grids = BASELINES.get(self.task, GRIDS[method]) if method == BASELINE else GRIDS[method]
        start = self.chosen.get(BASELINE, ()) + (self.chosen[FOLLOWS[method]] if method in FOLLOWS else ())
        start = tuple(dict.fromkeys(start))
        return [start + point for point in points(grids)]

    def choose(self, method: str, seeds: range) -> dict[str, Any]:
        """Choose the point that does best on the development set."""
        table = dev_results({changes: self.specs(method, changes, seeds, "tune") for changes in self.grid(method)})
        if not table:
            self.methods.remove(method)
            return {"chosen": None, "tried": []}
        best = max(table, key=lambda row: (row["dev"]["accuracy"], -row["dev"]["nll"]))
        self.chosen[method] = tuple(best["changes"])
        return {"chosen": best["changes"], "tried": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["yelp", "age", "snli"], help="datasets")
    parser.add_argument("--methods", nargs="+", default=list(GRIDS), choices=list(GRIDS))
    parser.add_argument("--data", type=Path, default=Path("prepared"), help="folder of prepared datasets")
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="folder of runs")
    parser.add_argument("--results", type=Path, default=Path("results/classification"), help="folder of tables")
    parser.add_argument("--tuning-seeds", type=int, default=2, help="seeds for tuning, numbered from 100")
    parser.add_argument("--seeds", type=int, default=6, help="seeds for the tables, numbered from 0")
    parser.add_argument("--jobs", type=int, default=0, help="runs in parallel; 0: all cores")
    parser.add_argument("--device", help="cpu or cuda; by default cuda if available")
    parser.add_argument("--set", action="append", default=[], help="key=value for every run; repeatable")
    stages = ["baseline", "methods", "runs", "tables"]
    parser.add_argument("--until", choices=stages, default="tables", help="stop after this stage")
    arguments = parser.parse_args()
    studies = [Classification(task, arguments) for task in arguments.tasks]
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
        specs.sort(key=lambda spec: "yelp" not in str(spec.folder))  # the longest first
        train_missing(specs, f"tuning {', '.join(methods)}", arguments.jobs)
        for study in studies:
            for method in [name for name in methods if name in study.methods]:
                tuned[study.task][method] = study.choose(method, tuning)
        update_json(arguments.results / "tuned.json", tuned)

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
        train_missing(specs, f"table of {study.task}", arguments.jobs)
        if arguments.until == "tables":
            write_table(study, methods, arguments)


def write_table(study: Classification, methods: Sequence[str], arguments: argparse.Namespace) -> None:
    folders = [study.folder(method, study.chosen[method], "final") for method in methods]
    folders = [folder for folder in folders if runs_in(folder)]
    table = rows(folders)
    text = as_markdown(table)
    print(f"\n{study.task}\n{text}", flush=True)
    save(arguments.results / f"{study.task}.md", text + "\n")
    runs = [run for folder in folders for run in runs_in(folder).values() if run.result]
    save(arguments.results / f"{study.task}.json", rows_as_data(table, runs))


if __name__ == "__main__":
    main()
