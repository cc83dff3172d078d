"""What the study of translation came to, as Markdown, JSON and figures."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from studies.engine import as_table, save, save_more, settings, tried
from studies.translation.rows import BASELINE, Row

from repulsive.diagnostics.head_count import HeadCount, HeadFit, fit_heads
from repulsive.errors import ConfigError
from repulsive.lab.engine import tables
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.task import Evaluation
from repulsive.lab.systems.translation import metrics
from repulsive.lab.systems.translation.parallel import REFERENCES
from repulsive.lab.text.pieces import Pieces
from repulsive.lab.text.prepared import Prepared
from repulsive.lab.text.tokens import PAD
from repulsive.pages import Content
from repulsive.pages.charts import heads_chart
from repulsive.pages.data.panels import Chart
from repulsive.pages.figures.write import check_matplotlib, write_figures

if TYPE_CHECKING:
    from studies.translation.run import Translation

COLUMNS = ("bleu", "sacrebleu", "chrf", "nll", "accuracy")
ERRORS: dict[str, tuple[str, Callable[[float], float]]] = {
    "nll": ("NLL", float),
    "bleu": ("100 - BLEU", lambda bleu: 100 - bleu),
}


@dataclass(frozen=True)
class Done:
    """A row, where its runs are, and those that have ended, by seed."""

    row: Row
    place: Path
    runs: dict[int, RunFolder]

    def entry(self, part: str) -> tuple[str, Path, dict[int, Evaluation]]:
        """What `tables.table` takes."""
        answers = {seed: Evaluation(run.metrics(part), run.items(part)) for seed, run in self.runs.items()}
        return self.row.label, self.place, answers


def write_tables(studies: Sequence[Translation], results: Path) -> None:
    """Everything there is."""
    from studies.translation.question import question
    from studies.translation.redundancy import redundancy

    tuned = {study.task: {method: _tuned(study, method) for method in study.methods} for study in studies}
    save_more(results / "tuned.json", {"chosen by": "NLL of a piece of the development set, mean over seeds", **tuned})
    for study in studies:
        add_texts(study)
        for name, write in {
            "question": question,
            "final": final,
            "ablation": ablation,
            "heads": heads,
            "redundancy": redundancy,
        }.items():
            done = ended_rows(study, name)
            if len(done) > 1 and done[0].row.method == BASELINE:
                write(study, done, results)
            elif study.rows(name):
                print(f"{name} of {study.task}: no table, too little has ended")


def ended_rows(study: Translation, stage: str) -> list[Done]:
    """Rows of a stage that have a result."""
    places = [(row, study.place(row, stage)) for row in study.rows(stage)]
    return [Done(row, place, tables.finished_in(place)) for row, place in places if tables.ended([place])]


def _tuned(study: Translation, method: str) -> dict[str, Any]:
    grid = study.grid(method)
    table = tried({row.changes: study.runs(row, "tune") for row in grid})
    return {"chosen": study.chosen(method), "points": len(grid), "tried": table}


# -- tables over seeds ------------------------------------------------------------------------------------------------


def final(study: Translation, done: Sequence[Done], results: Path) -> None:
    """Every method, on the test set and the further ones."""
    first = next(iter(done[0].runs.values())).result or {}
    other = ("dev", "notes", "sha256")
    parts = [name for name, found in first.items() if isinstance(found, dict) and name not in other]
    _write(study, done, results / study.task, parts)


def ablation(study: Translation, done: Sequence[Done], results: Path) -> None:
    """The paper's table of modules."""
    _write(study, done, results / "ablation", ["test"])


def _write(study: Translation, done: Sequence[Done], path: Path, parts: Sequence[str]) -> None:
    lines, written = [f"# {path.name}", ""], {}
    for part in parts:
        found = tables.table([each.entry(part) for each in done])
        lines += [f"## {part}", "", tables.as_markdown(found, COLUMNS), *_beside(done, part), ""]
        written[part] = as_table(found, [run for each in done for run in each.runs.values()])
    print(f"\n{study.task}: {path.name}\n" + "\n".join(lines[2:]), flush=True)
    save(path.with_suffix(".md"), "\n".join([*lines, *settings([each.row for each in done])]) + "\n")
    save(path.with_suffix(".json"), written)


def _beside(done: Sequence[Done], part: str) -> list[str]:
    """What comparisons with another row than the first say."""
    rows, lines = {each.row.label: each for each in done}, []
    for each in done:
        other = rows.get(each.row.against)
        if other not in (None, done[0], each):
            pair = tables.table([other.entry(part), each.entry(part)])[1]
            lines += [f"- {pair.label} against {each.row.against}, {name}: {c}" for name, c in pair.against.items()]
    return lines


# -- how many heads ---------------------------------------------------------------------------------------------------


def heads(study: Translation, done: Sequence[Done], results: Path) -> None:
    """Error against the number of heads, with the curve that the paper's bound has the form of."""
    lines = ["| method | of | M | mean [95 % interval] |", "|" + " --- |" * 4]
    charts, written = [], {}
    for metric, (name, made) in ERRORS.items():
        groups: dict[str, list[HeadCount]] = {}
        for each in done:
            count = next(iter(each.runs.values())).recipe["model"]["heads"]
            errors = tuple(made(run.metrics("test")[metric]) for run in each.runs.values())
            groups.setdefault(each.row.label, []).append(HeadCount(count, errors))
        fits = {label: fit_heads(counts) for label, counts in groups.items() if len(counts) >= 3}
        charts.append(heads_chart(groups, fits, name, f"heads-{metric}"))
        written[metric] = {label: _curve(counts, fits.get(label)) for label, counts in groups.items()}
        for label, counts in groups.items():
            lines += [f"| {label} | {name} | {c.heads} | {c.mean:.4f}{_interval(c)} |" for c in counts]
            lines += [f"| {label} | {name} | fit | {_formula(fits[label])} |"] if label in fits else []
    print(f"\n{study.task}: heads\n" + "\n".join(lines), flush=True)
    save(results / "heads.md", "\n".join(["# heads", "", "On the test set.", "", *lines]) + "\n")
    save(results / "heads.json", written)
    draw(charts, results)


def _curve(counts: Sequence[HeadCount], fit: HeadFit | None) -> dict[str, Any]:
    points = [dataclasses.asdict(c) | {"mean": c.mean, "interval": c.interval} for c in counts]
    return {"points": points, "fit": fit and dataclasses.asdict(fit) | {"best": fit.best}}


def _interval(count: HeadCount) -> str:
    return "" if count.interval is None else " [{:.4f}, {:.4f}]".format(*count.interval)


def _formula(fit: HeadFit) -> str:
    best = "lowest nowhere" if fit.best is None else f"lowest at M = {fit.best:.1f}"
    return f"{fit.a:.4g} / √M + {fit.b:.4g} M + {fit.c:.4g}, {best}"


def draw(charts: Sequence[Chart], results: Path) -> None:
    """Charts as SVG; without Matplotlib there are none."""
    try:
        check_matplotlib()
    except ConfigError as error:
        print(error)
        return
    with tempfile.TemporaryDirectory() as folder:
        for path in write_figures(Path(folder), Content("", charts=charts)):
            if path.suffix == ".svg":
                shutil.copy(path, results)


# -- sacreBLEU --------------------------------------------------------------------------------------------------------


def add_texts(study: Translation) -> None:
    """Score detokenised translations where the machine that trained could not, from those it kept."""
    stages = ("final", "ablation", "heads")
    runs = {run.path: run for stage in stages for each in ended_rows(study, stage) for run in each.runs.values()}
    lacking = [run for run in runs.values() if "sacrebleu" not in run.metrics("test")]
    if not lacking:
        return
    if find_spec("sacremoses") is None or not study.data.is_dir():
        print(f"{study.task}: {len(lacking)} runs without sacreBLEU; it needs sacremoses and {study.data}")
        return
    prepared = Prepared.load(study.data)
    pieces, references = Pieces.of(prepared), json.loads(prepared.extra[REFERENCES])
    if pieces.tokenizer == "none":  # nobody knows how the texts were written
        return
    for run in lacking:
        run.add_scores(scored(run, pieces, references))


def scored(run: RunFolder, pieces: Pieces, references: Mapping[str, Mapping[str, list[str]]]) -> dict[str, Any]:
    """A run's result with sacreBLEU and chrF of the texts, for all parts whose translations were kept."""
    result = dict(run.result or {})
    for part, known in references.items():
        if part not in result or not (run.path / f"{part}.safetensors").is_file():
            continue
        kept = run.items(part)["hypotheses"]  # [N, T]
        texts = [pieces.text(pieces.words(line[line != PAD].tolist())) for line in kept]
        found = {
            "sacrebleu": metrics.sacrebleu(texts, known["text"], lowercase=pieces.lowercase),
            "chrf": metrics.chrf(texts, known["text"], lowercase=pieces.lowercase),
        }
        result[part] = result[part] | {name: score.value for name, score in found.items()}
        result["notes"] = result.get("notes", {}) | {name: score.signature for name, score in found.items()}
    return result
