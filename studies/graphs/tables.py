"""Write the results of the graph-to-text study as Markdown and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from studies.engine import dev_results
from studies.graphs.rows import BASELINE, Row
from studies.output import list_settings, rows_as_data, save, update_json

from repulsive.errors import RunError
from repulsive.lab.engine import tables
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.task import Evaluation
from repulsive.lab.systems.graphs.meteor import NLTK, OFFICIAL, official_program
from repulsive.lab.systems.graphs.metrics import score_texts
from repulsive.lab.systems.graphs.prepared import PreparedGraphs
from repulsive.lab.systems.graphs.task import texts_of
from repulsive.lab.text.tokens import PAD
from repulsive.metrics.student import interval
from repulsive.safety.markdown import format_table

if TYPE_CHECKING:
    from studies.graphs.study import Graphs

COLUMNS = (
    "bleu",
    "BLEU-1",
    "BLEU-2",
    "BLEU-3",
    OFFICIAL,
    NLTK,
    "ROUGE-1",
    "ROUGE-2",
    "ROUGE-L",
    "ROUGE-L (caption)",
    "entity coverage",
    "repeated clauses",
    "nll",
    "accuracy",
    "dev nll",
    "seconds",
)
NAMES = {"bleu": "BLEU-4"}
TOLERANCE = 1e-6  # between scores of the same texts


@dataclass(frozen=True)
class FinishedRow:
    """A row, the folder of its runs, and the finished ones by seed."""

    row: Row
    folder: Path
    runs: dict[int, RunFolder]

    def values(self, metric: str) -> list[float]:
        """Values of a metric, one for each seed; empty if a run lacks it."""
        by_seed = [evaluation.metrics.get(metric) for evaluation in self.evaluations().values()]
        return [float(value) for value in by_seed if value is not None] if None not in by_seed else []

    def evaluations(self) -> dict[int, Evaluation]:
        """Evaluations on the test set by seed, with the NLL on the development set and the seconds of training."""
        evaluations = {}
        for seed, run in self.runs.items():
            more = {"dev nll": run.metrics("dev")["nll"], "seconds": (run.result or {})["seconds"]}
            evaluations[seed] = Evaluation(run.metrics("test") | more, run.items("test"))
        return evaluations


def write_tables(studies: Sequence[Graphs], results: Path) -> None:
    """Write the tables of all datasets that have results."""
    tuned = {study.task: {method: _tuned(study, method) for method in study.methods} for study in studies}
    chosen_by = "NLL per word of the development set, mean over seeds"
    update_json(results / "tuned.json", {"chosen by": chosen_by, **tuned})
    for study in studies:
        finished = [
            FinishedRow(row, folder, tables.finished_in(folder))
            for row in study.rows("final")
            if tables.ended([folder := study.row_folder(row)])
        ]
        if not finished or finished[0].row.method != BASELINE:
            print(f"{study.task}: no table, the baseline has not finished")
            continue
        add_scores(study, [run for each in finished for run in each.runs.values()])
        _write(study, finished, results / study.task)


def _tuned(study: Graphs, method: str) -> dict[str, Any]:
    grid = study.grid(method)
    table = dev_results({row.changes: study.runs(row, "tune") for row in grid})
    return {"chosen": study.chosen(method), "points": len(grid), "tried": table}


def _write(study: Graphs, finished: Sequence[FinishedRow], path: Path) -> None:
    rows = tables.table([(each.row.label, each.folder, each.evaluations()) for each in finished])
    data = rows_as_data(rows, [run for each in finished for run in each.runs.values()])
    intervals = {each.row.label: {name: interval(each.values(name)) for name in COLUMNS} for each in finished}
    for row in data["rows"]:
        row["intervals"] = {name: ends for name, ends in intervals[row["label"]].items() if ends is not None}
    lines = [f"# {study.task}", "", _mean_table(finished), "", *_comparisons(rows), ""]
    print("\n".join(lines), flush=True)
    notes = [
        "Test set, means over seeds with 95 % intervals by Student's t; NLL and accuracy are per word.",
        f"{data['seconds_a_run']:.0f} s a run (median), {data['device']}.",
    ]
    text = "\n".join([*lines, *notes, "", *list_settings([each.row for each in finished])])
    save(path.with_suffix(".md"), text + "\n")
    save(path.with_suffix(".json"), data)


def _mean_table(finished: Sequence[FinishedRow]) -> str:
    shown = [name for name in COLUMNS if any(each.values(name) for each in finished)]
    head = ["method", "seeds", *(NAMES.get(name, name) for name in shown)]
    rows = [[each.row.label, str(len(each.runs)), *(_cell(each.values(name)) for name in shown)] for each in finished]
    return format_table(head, rows)


def _comparisons(rows: Sequence[tables.Row]) -> list[str]:
    return [
        f"- {row.label} against {rows[0].label}, {NAMES.get(metric, metric)}: {comparison}"
        for row in rows
        for metric, comparison in row.against.items()
    ]


def _cell(values: Sequence[float]) -> str:
    if not values:
        return ""
    mean, ends = sum(values) / len(values), interval(values)
    return f"{mean:.3f}" if ends is None else f"{mean:.3f} [{ends[0]:.3f}, {ends[1]:.3f}]"


# -- scores of stored texts ------------------------------------------------------------------------------------------


def add_scores(study: Graphs, runs: Sequence[RunFolder]) -> None:
    """Add METEOR to runs that lack it, from the texts that they kept."""
    missing = [run for run in runs if OFFICIAL not in run.metrics("test")]
    if not missing:
        return
    if official_program() is None or not study.data.is_dir():
        print(f"{study.task}: {len(missing)} runs without METEOR; it needs Java, repulsive[meteor] and {study.data}")
        return
    data = PreparedGraphs.load(study.data)
    for run in missing:
        run.add_scores(with_scores(run, data))


def with_scores(run: RunFolder, data: PreparedGraphs) -> dict[str, Any]:
    """A run's result with all scores of its texts about the test set.

    Raises:
        RunError: a stored score differs, so the texts are about other graphs.
    """
    rows = [row[row != PAD].tolist() for row in run.items("test")["hypotheses"]]  # of [N, T]
    stored, part = run.metrics("test"), data.parts["test"]
    scores = score_texts(texts_of(data, "test", rows), part.reference_words, part.names)
    if differing := [name for name in scores if name in stored and abs(stored[name] - scores[name]) > TOLERANCE]:
        raise RunError(
            f"{run.path}: {differing[0]} differs from that of its texts with {data.folder}; pass the run's own --data"
        )
    return dict(run.result or {}) | {"test": stored | scores}
