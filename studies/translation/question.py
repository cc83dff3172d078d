"""The table of the question: how fast and how far each row learns, and what becomes of its heads."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from studies.engine import save
from studies.translation.rows import DRAWN, QUESTION
from studies.translation.tables import Done, draw

from repulsive.errors import RunError
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.tables import cell, table
from repulsive.pages.charts import learning_curve

if TYPE_CHECKING:
    from studies.translation.run import Translation

EARLY = 0.1  # of all steps
MEASURED = {"norm": "dev", "cosine": "dev", "ratio": "heads", "distance": "heads"}  # and in which lines
Facts = dict[str, list[float]]
HEAD = """\
NLL of a piece of the development set: at the first look after a tenth of the steps (early), at the lowest look, and of
the averaged weights a training ends with (end); BLEU of greedy translations. At the last look: norm of a head of a
projection and cosine of two, means over all projections; ratio of repulsion to drive and distance of two heads.
Differences are of "end", with a 95 % interval, paired by seed and sentence, where the answers were kept.
"""


def question(study: Translation, done: Sequence[Done], results: Path) -> None:
    """Write the table, the numbers and the learning curves of the first rows."""
    by_label = {each.row.label: each for each in done}
    facts = {label: _facts(each) for label, each in by_label.items()}
    shown = [name for name in ("early", "lowest", "end", "bleu", *MEASURED) if any(name in f for f in facts.values())]
    lines = ["| | seeds | " + " | ".join([*shown, "difference", "from"]) + " |", "|" + " --- |" * (len(shown) + 4)]
    written = []
    for label, each in by_label.items():
        other = by_label.get(each.row.against)
        told = "" if other is None or other is each else _difference(each, other, facts)
        cells = [str(cell(facts[label][name])) if name in facts[label] else "" for name in shown]
        words = [label, str(len(each.runs)), *cells, told, each.row.against if told else ""]
        lines.append("| " + " | ".join(words) + " |")
        curves = {seed: run.curve("dev", "nll") for seed, run in each.runs.items()}
        seen = {"seeds": list(each.runs), **facts[label], "difference": told, "curves": curves}
        written.append(dataclasses.asdict(each.row) | seen)
    best, missing = study.winner(), len(study.rows("question")) - len(done)
    lines += ["", f"Least NLL among the rows that change SVGD alone: {best.label}." if best else "Not all have ended."]
    lines += [f"{missing} rows have no result."] if missing else []
    print(f"\n{study.task}: question\n" + "\n".join(lines), flush=True)
    save(results / "question.md", "\n".join(["# question", "", HEAD, *lines]) + "\n")
    save(results / "question.json", written)
    drawn = [by_label[row.label] for row in QUESTION[:DRAWN] if row.label in by_label]
    late = {each.row.label: {seed: _late(run) for seed, run in each.runs.items()} for each in drawn}
    first = {seed: dict(curve) for seed, curve in late[drawn[0].row.label].items()}
    apart = {
        label: [[(x, y - first[seed][x]) for x, y in curve if x in first[seed]] for seed, curve in curves.items()]
        for label, curves in late.items()
        if curves.keys() <= first.keys()
    }
    absolute = {label: list(curves.values()) for label, curves in late.items()}
    charts = [learning_curve("NLL of the development set", absolute, "question")]
    draw([*charts, learning_curve(f"NLL less that of {drawn[0].row.label}", apart, "question-difference")], results)


def _facts(each: Done) -> Facts:
    """What a row shows, seed by seed; what no run has is left out."""
    found: Facts = {}
    for run in each.runs.values():
        dev = run.metrics("dev")
        values = {"end": dev["nll"], "bleu": dev["bleu"]}
        if late := _late(run):
            values |= {"early": late[0][1], "lowest": min(nll for _, nll in run.curve("dev", "nll"))}
        values |= {name: points[-1][1] for name, kind in MEASURED.items() if (points := run.curve(kind, name))}
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return found


def _late(run: RunFolder) -> list[tuple[float, float]]:
    """The learning curve from a tenth of all steps on."""
    steps = (run.result or {})["steps"]
    return [(step, nll) for step, nll in run.curve("dev", "nll") if step >= EARLY * steps]


def _difference(each: Done, other: Done, facts: dict[str, Facts]) -> str:
    try:
        return str(table([other.entry("dev"), each.entry("dev")])[1].against["nll"])
    except (RunError, KeyError):  # answers were not kept, or on no seed that both have
        mine, theirs = (statistics.fmean(facts[done.row.label]["end"]) for done in (each, other))
        return f"{mine - theirs:+.4f}"
