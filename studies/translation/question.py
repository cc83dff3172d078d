"""The table of the stage `question`: how fast and how well each variant of the rule learns, and its heads."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from studies.output import save, write_svgs
from studies.translation.finished_rows import FinishedRow
from studies.translation.rows import DRAWN, QUESTION

from repulsive.errors import RunError
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.tables import cell, table
from repulsive.pages.charts import learning_curve
from repulsive.safety.markdown import format_table

if TYPE_CHECKING:
    from studies.translation.study import Translation

EARLY = 0.1  # of all steps
MEASURED = {"norm": "dev", "cosine": "dev", "ratio": "heads", "distance": "heads"}  # metric -> kind of log line
Metrics = dict[str, list[float]]  # metric -> one value for each seed
HEAD = """\
NLL per token of the development set: at the first evaluation after a tenth of the steps (early), at the lowest
evaluation, and of the averaged weights at the end of training (end); BLEU of greedy translations. At the last
evaluation: norm of a head and cosine between two heads of a projection, means over all projections; ratio of repulsion
to drive, and distance between two heads. Differences are those of "end", with a 95 % interval, paired by seed and
sentence if the predictions were kept.
"""


def write_question(study: Translation, finished: Sequence[FinishedRow], results: Path) -> None:
    """Write the table, the numbers and the learning curves of the first rows."""
    by_label = {each.row.label: each for each in finished}
    metrics = {label: _metrics(each) for label, each in by_label.items()}
    names = ("early", "lowest", "end", "bleu", *MEASURED)
    shown = [name for name in names if any(name in of_row for of_row in metrics.values())]
    rows, data = [], []
    for label, each in by_label.items():
        baseline = by_label.get(each.row.against)
        difference = "" if baseline is None or baseline is each else _difference(each, baseline, metrics)
        cells = [str(cell(metrics[label][name])) if name in metrics[label] else "" for name in shown]
        rows.append([label, str(len(each.runs)), *cells, difference, each.row.against if difference else ""])
        curves = {seed: run.curve("dev", "nll") for seed, run in each.runs.items()}
        facts = {"seeds": list(each.runs), **metrics[label], "difference": difference, "curves": curves}
        data.append(dataclasses.asdict(each.row) | facts)
    lines = [format_table(["row", "seeds", *shown, "difference", "compared with"], rows), ""]
    best, missing = study.best_rule(), len(study.rows("question")) - len(finished)
    lines += [
        f"Lowest NLL among rows that change SVGD alone: {best.label}." if best else "Some runs have not finished."
    ]
    lines += [f"{missing} rows have no result."] if missing else []
    print(f"\n{study.task}: question\n" + "\n".join(lines), flush=True)
    save(results / "question.md", "\n".join(["# question", "", HEAD, *lines]) + "\n")
    save(results / "question.json", data)
    _draw([by_label[row.label] for row in QUESTION[:DRAWN] if row.label in by_label], results)


def _draw(rows: Sequence[FinishedRow], results: Path) -> None:
    """Draw learning curves, and their differences from that of the first row."""
    late = {each.row.label: {seed: _late_curve(run) for seed, run in each.runs.items()} for each in rows}
    baseline = rows[0].row.label
    first = {seed: dict(curve) for seed, curve in late[baseline].items()}
    differences = {
        label: [[(x, y - first[seed][x]) for x, y in curve if x in first[seed]] for seed, curve in curves.items()]
        for label, curves in late.items()
        if curves.keys() <= first.keys()
    }
    absolute = {label: list(curves.values()) for label, curves in late.items()}
    charts = [
        learning_curve("NLL of the development set", absolute, "question"),
        learning_curve(f"NLL minus that of {baseline}", differences, "question-difference"),
    ]
    write_svgs(charts, results)


def _metrics(each: FinishedRow) -> Metrics:
    """The numbers of a row by seed; metrics that no run has are left out."""
    metrics: Metrics = {}
    for run in each.runs.values():
        dev = run.metrics("dev")
        values = {"end": dev["nll"], "bleu": dev["bleu"]}
        if late := _late_curve(run):
            values |= {"early": late[0][1], "lowest": min(nll for _, nll in run.curve("dev", "nll"))}
        values |= {name: points[-1][1] for name, kind in MEASURED.items() if (points := run.curve(kind, name))}
        for name, value in values.items():
            metrics.setdefault(name, []).append(value)
    return metrics


def _late_curve(run: RunFolder) -> list[tuple[float, float]]:
    """The learning curve after the first tenth of the steps."""
    steps = (run.result or {})["steps"]
    return [(step, nll) for step, nll in run.curve("dev", "nll") if step >= EARLY * steps]


def _difference(each: FinishedRow, baseline: FinishedRow, metrics: dict[str, Metrics]) -> str:
    try:
        return str(table([baseline.entry("dev"), each.entry("dev")])[1].against["nll"])
    except (RunError, KeyError):  # predictions were not kept, or the two share no seed
        ours, theirs = (statistics.fmean(metrics[of.row.label]["end"]) for of in (each, baseline))
        return f"{ours - theirs:+.4f}"
