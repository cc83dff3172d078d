"""Write the results of the translation study as Markdown, JSON and figures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from studies.engine import dev_results
from studies.output import list_settings, rows_as_data, save, update_json, write_svgs
from studies.translation.end_of_training import LEAD, Metrics, final_metrics, format_metrics
from studies.translation.finished_rows import FinishedRow, finished_rows
from studies.translation.question import write_question
from studies.translation.redundancy import write_redundancy
from studies.translation.rows import BASELINE
from studies.translation.study import TUNED

from repulsive.diagnostics.head_count import HeadCount, HeadFit, fit_heads
from repulsive.lab.engine import tables
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.systems.translation import metrics
from repulsive.lab.systems.translation.prepare import REFERENCES
from repulsive.lab.text.pieces import Pieces
from repulsive.lab.text.prepared import Prepared
from repulsive.lab.text.tokens import PAD
from repulsive.pages.charts import heads_chart
from repulsive.safety.markdown import format_table

if TYPE_CHECKING:
    from studies.translation.study import Translation

COLUMNS = ("bleu", "sacrebleu", "chrf", "nll", "accuracy")
ERRORS: dict[str, tuple[str, Callable[[float], float]]] = {
    "nll": ("NLL", float),
    "bleu": ("100 - BLEU", lambda bleu: 100 - bleu),
}


def write_tables(studies: Sequence[Translation], results: Path) -> None:
    """Write the tables of all stages that have results."""
    tuned = {study.task: {method: _tuned(study, method) for method in study.methods} for study in studies}
    chosen_by = "NLL per token of the development set, mean over seeds"
    if not any(study.stored for study in studies):
        update_json(results / TUNED, {"chosen by": chosen_by, **tuned})
    writers = {
        "question": write_question,
        "final": write_final,
        "ablation": write_ablation,
        "heads": write_heads,
        "redundancy": write_redundancy,
    }
    for study in studies:
        add_text_scores(study)
        for stage, write in writers.items():
            finished = finished_rows(study, stage)
            if len(finished) > 1 and finished[0].row.method == BASELINE:
                write(study, finished, results)
            elif study.rows(stage):
                print(f"{stage} of {study.task}: no table, too few runs have finished")


def _tuned(study: Translation, method: str) -> dict[str, Any]:
    grid = study.grid(method)
    table = dev_results({row.changes: study.runs(row, "tune") for row in grid})
    return {"chosen": study.chosen(method), "points": len(grid), "tried": table}


# -- tables over seeds ------------------------------------------------------------------------------------------------


def write_final(study: Translation, finished: Sequence[FinishedRow], results: Path) -> None:
    """Write the table of all methods, on the test set and any further test sets."""
    first = next(iter(finished[0].runs.values())).result or {}
    other = ("dev", "notes", "sha256")
    parts = [name for name, value in first.items() if isinstance(value, dict) and name not in other]
    _write(study, finished, results / study.task, parts)


def write_ablation(study: Translation, finished: Sequence[FinishedRow], results: Path) -> None:
    """Write the paper's table of attention modules."""
    _write(study, finished, results / "ablation", ["test"])


def _write(study: Translation, finished: Sequence[FinishedRow], path: Path, parts: Sequence[str]) -> None:
    lines, data = [f"# {path.name}", ""], {}
    for part in parts:
        rows = tables.table([each.entry(part) for each in finished])
        lines += [f"## {part}", "", tables.as_markdown(rows, COLUMNS), *_other_comparisons(finished, part), ""]
        data[part] = rows_as_data(rows, [run for each in finished for run in each.runs.values()])
    print(f"\n{study.task}: {path.name}\n" + "\n".join(lines[2:]), flush=True)
    save(path.with_suffix(".md"), "\n".join([*lines, *list_settings([each.row for each in finished])]) + "\n")
    save(path.with_suffix(".json"), data)


def _other_comparisons(finished: Sequence[FinishedRow], part: str) -> list[str]:
    """Comparisons of rows whose baseline is not the first row."""
    by_label, lines = {each.row.label: each for each in finished}, []
    for each in finished:
        baseline = by_label.get(each.row.against)
        if baseline not in (None, finished[0], each):
            pair = tables.table([baseline.entry(part), each.entry(part)])[1]
            lines += [f"- {pair.label} against {each.row.against}, {name}: {c}" for name, c in pair.against.items()]
    return lines


# -- number of heads --------------------------------------------------------------------------------------------------


def write_heads(study: Translation, finished: Sequence[FinishedRow], results: Path) -> None:
    """Write the error against the number of heads, with a fitted curve of the form of the paper's bound."""
    rows, charts, data = [], [], dict[str, Any]()
    for metric, (name, error_of) in ERRORS.items():
        groups: dict[str, list[HeadCount]] = {}
        for each in finished:
            count = _number_of_heads(each)
            errors = tuple(error_of(run.metrics("test")[metric]) for run in each.runs.values())
            groups.setdefault(each.row.label, []).append(HeadCount(count, errors))
        fits = {label: fit_heads(counts) for label, counts in groups.items() if len(counts) >= 3}
        charts.append(heads_chart(groups, fits, name, f"heads-{metric}"))
        data[metric] = {label: _curve(counts, fits.get(label)) for label, counts in groups.items()}
        for label, counts in groups.items():
            rows += [[label, name, str(c.heads), f"{c.mean:.4f}{_interval(c)}"] for c in counts]
            rows += [[label, name, "fit", _formula(fits[label])]] if label in fits else []
    table = format_table(["method", "metric", "heads", "mean [95 % interval]"], rows)
    models: dict[tuple[str, ...], Metrics] = {}
    for each in sorted(finished, key=lambda each: (each.row.method != BASELINE, _number_of_heads(each))):
        models[each.row.label, str(_number_of_heads(each))] = final_metrics(each)
    lines = ["On the test set.", "", table, "", "## models", "", LEAD, format_metrics(models, ("method", "heads"))]
    print(f"\n{study.task}: heads\n" + "\n".join(lines), flush=True)
    save(results / "heads.md", "\n".join(["# heads", "", *lines]) + "\n")
    data["models"] = [{"method": label, "heads": int(count), **each} for (label, count), each in models.items()]
    save(results / "heads.json", data)
    write_svgs(charts, results)


def _number_of_heads(each: FinishedRow) -> int:
    return int(next(iter(each.runs.values())).recipe["model"]["heads"])


def _curve(counts: Sequence[HeadCount], fit: HeadFit | None) -> dict[str, Any]:
    points = [dataclasses.asdict(c) | {"mean": c.mean, "interval": c.interval} for c in counts]
    return {"points": points, "fit": fit and dataclasses.asdict(fit) | {"best": fit.best}}


def _interval(count: HeadCount) -> str:
    return "" if count.interval is None else " [{:.4f}, {:.4f}]".format(*count.interval)


def _formula(fit: HeadFit) -> str:
    best = "no minimum" if fit.best is None else f"minimum at M = {fit.best:.1f}"
    return f"{fit.a:.4g} / √M + {fit.b:.4g} M + {fit.c:.4g}, {best}"


# -- sacreBLEU --------------------------------------------------------------------------------------------------------


def add_text_scores(study: Translation) -> None:
    """Add sacreBLEU and chrF to runs that lack them, from the translations that they kept."""
    stages = ("final", "ablation", "heads")
    runs = {run.path: run for stage in stages for each in finished_rows(study, stage) for run in each.runs.values()}
    missing = [run for run in runs.values() if "sacrebleu" not in run.metrics("test")]
    if not missing:
        return
    if find_spec("sacremoses") is None or not study.data.is_dir():
        print(f"{study.task}: {len(missing)} runs without sacreBLEU; it needs sacremoses and {study.data}")
        return
    prepared = Prepared.load(study.data)
    pieces, references = Pieces.of(prepared), json.loads(prepared.extra[REFERENCES])
    if pieces.tokenizer == "none":  # the original texts cannot be restored
        return
    for run in missing:
        run.add_scores(with_text_scores(run, pieces, references))


def with_text_scores(
    run: RunFolder, pieces: Pieces, references: Mapping[str, Mapping[str, list[str]]]
) -> dict[str, Any]:
    """A run's result with sacreBLEU and chrF, for all parts whose translations were kept."""
    result = dict(run.result or {})
    for part, reference in references.items():
        if part not in result or not (run.path / f"{part}.safetensors").is_file():
            continue
        hypotheses = run.items(part)["hypotheses"]  # [N, T]
        texts = [pieces.text(pieces.words(line[line != PAD].tolist())) for line in hypotheses]
        scores = {
            "sacrebleu": metrics.sacrebleu(texts, reference["text"], lowercase=pieces.lowercase),
            "chrf": metrics.chrf(texts, reference["text"], lowercase=pieces.lowercase),
        }
        result[part] = result[part] | {name: score.value for name, score in scores.items()}
        result["notes"] = result.get("notes", {}) | {name: score.signature for name, score in scores.items()}
    return result
