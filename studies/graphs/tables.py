"""What the study of graphs to text came to, as Markdown and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from studies.engine import as_table, save, save_more, settings, tried
from studies.graphs.rows import BASELINE, Row

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

if TYPE_CHECKING:
    from studies.graphs.run import Graphs

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
CLOSE = 1e-6  # scores of the same texts


@dataclass(frozen=True)
class Done:
    """A row, where its runs are, and those that have ended, by seed."""

    row: Row
    place: Path
    runs: dict[int, RunFolder]

    def values(self, metric: str) -> list[float]:
        """A metric of every seed's run; none where one lacks it."""
        found = [answers.metrics.get(metric) for answers in self.answers().values()]
        return [float(x) for x in found if x is not None] if None not in found else []

    def answers(self) -> dict[int, Evaluation]:
        """What the runs answered on the test set, how well they did on dev, and the seconds they took."""
        found = {}
        for seed, run in self.runs.items():
            more = {"dev nll": run.metrics("dev")["nll"], "seconds": (run.result or {})["seconds"]}
            found[seed] = Evaluation(run.metrics("test") | more, run.items("test"))
        return found


def write_tables(studies: Sequence[Graphs], results: Path) -> None:
    """Everything there is."""
    tuned = {study.task: {method: _tuned(study, method) for method in study.methods} for study in studies}
    save_more(results / "tuned.json", {"chosen by": "NLL of a word of the development set, mean over seeds", **tuned})
    for study in studies:
        places = [(row, study.place(row)) for row in study.rows("final")]
        done = [Done(row, place, tables.finished_in(place)) for row, place in places if tables.ended([place])]
        if not done or done[0].row.method != BASELINE:
            print(f"{study.task}: no table, the baseline has not ended")
            continue
        add_scores(study, [run for each in done for run in each.runs.values()])
        _write(study, done, results / study.task)


def _tuned(study: Graphs, method: str) -> dict[str, Any]:
    grid = study.grid(method)
    table = tried({row.changes: study.runs(row, "tune") for row in grid})
    return {"chosen": study.chosen(method), "points": len(grid), "tried": table}


def _write(study: Graphs, done: Sequence[Done], path: Path) -> None:
    found = tables.table([(each.row.label, each.place, each.answers()) for each in done])
    written = as_table(found, [run for each in done for run in each.runs.values()])
    intervals = {each.row.label: {name: interval(each.values(name)) for name in COLUMNS} for each in done}
    for row in written["rows"]:
        row["intervals"] = {name: x for name, x in intervals[row["label"]].items() if x is not None}
    lines = [f"# {study.task}", "", *_means(done), "", *_against(found), ""]
    took = f"{written['seconds_a_run']:.0f} s a run (median), {written['device']}."
    print("\n".join(lines), flush=True)
    note = "Test set, means over seeds with 95 % intervals by Student's t; NLL and accuracy are those of a word."
    save(path.with_suffix(".md"), "\n".join([*lines, note, took, "", *settings([each.row for each in done])]) + "\n")
    save(path.with_suffix(".json"), written)


def _means(done: Sequence[Done]) -> list[str]:
    shown = [name for name in COLUMNS if any(each.values(name) for each in done)]
    head = ["method", "seeds", *(NAMES.get(name, name) for name in shown)]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for each in done:
        cells = [_cell(each.values(name)) for name in shown]
        lines.append("| " + " | ".join([each.row.label, str(len(each.runs)), *cells]) + " |")
    return lines


def _against(found: Sequence[tables.Row]) -> list[str]:
    return [
        f"- {row.label} against {found[0].label}, {NAMES.get(metric, metric)}: {comparison}"
        for row in found
        for metric, comparison in row.against.items()
    ]


def _cell(values: Sequence[float]) -> str:
    if not values:
        return ""
    mean, ends = sum(values) / len(values), interval(values)
    return f"{mean:.3f}" if ends is None else f"{mean:.3f} [{ends[0]:.3f}, {ends[1]:.3f}]"


# -- scores of the texts that runs keep -------------------------------------------------------------------------------


def add_scores(study: Graphs, runs: Sequence[RunFolder]) -> None:
    """Score texts where the machine that trained could not, from what it wrote."""
    lacking = [run for run in runs if OFFICIAL not in run.metrics("test")]
    if not lacking:
        return
    if official_program() is None or not study.data.is_dir():
        print(f"{study.task}: {len(lacking)} runs without METEOR; it needs Java, repulsive[meteor] and {study.data}")
        return
    data = PreparedGraphs.load(study.data)
    for run in lacking:
        run.add_scores(scored(run, data))


def scored(run: RunFolder, data: PreparedGraphs) -> dict[str, Any]:
    """A run's result with all scores of its texts about the test set.

    Raises:
        RunError: scores that the run has are others: the texts are about other graphs.
    """
    rows = [row[row != PAD].tolist() for row in run.items("test")["hypotheses"]]  # of [N, T]
    known, part = run.metrics("test"), data.parts["test"]
    found = score_texts(texts_of(data, "test", rows), part.reference_words, part.names)
    if other := [name for name in found if name in known and abs(known[name] - found[name]) > CLOSE]:
        raise RunError(f"{run.path}: has another {other[0]} than its texts with {data.folder}; give its own --data")
    return dict(run.result or {}) | {"test": known | found}
