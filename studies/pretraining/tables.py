"""Write the results of the pre-training study as Markdown, JSON and figures."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from studies.output import save, write_svgs
from studies.pretraining.heads import heads_file
from studies.pretraining.rows import AFTER_MNLI, BASELINE, METHODS

from repulsive.errors import RunError
from repulsive.lab.engine import tables
from repulsive.lab.engine.files import read_json
from repulsive.lab.engine.run_reader import RUN
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.task import Evaluation
from repulsive.lab.paper.differences import over_seeds, scaled
from repulsive.lab.systems.glue.data import TASKS
from repulsive.lab.systems.glue.table import FROM_RUN, as_markdown, system_of, title
from repulsive.metrics.compare import Comparison
from repulsive.pages.charts import learning_curve
from repulsive.safety.markdown import format_table

if TYPE_CHECKING:
    from studies.pretraining.study import Export, Pretrainings

Scores = dict[str, dict[int, float]]  # column -> seed -> the task's own metric, times 100
HEAD = """\
Scores are those of the development sets, by each task's own metric, times 100, of the last weights: mean and standard
deviation over fine-tunings. Differences have a 95 % interval over repeats and items together; for Spearman's
correlation, means over tasks, and runs without stored predictions, over repeats alone. Repeats from one pre-training
do not show how much pre-trainings vary: `studies.pretraining.combine` compares several.
"""


def write_tables(study: Pretrainings, results: Path) -> None:
    """Write all tables and figures for which there are results."""
    write_glue(study, results)
    write_curve(study, results)
    write_heads(study, results)


def runs_of(study: Pretrainings, models: Sequence[Export]) -> dict[str, dict[int, RunFolder]]:
    """Finished fine-tunings from some models: column -> seed -> run."""
    columns: dict[str, dict[int, RunFolder]] = {}
    for task in (*study.tasks, AFTER_MNLI):
        column = FROM_RUN if task == AFTER_MNLI else task
        for model in models:
            for seed, run in tables.runs_in(study.fine_tuning_folder(model, task)).items():
                if run.result is not None and seed in study.repeats(model):
                    columns.setdefault(column, {})[seed] = run
    return columns


def scores_of(runs: Mapping[str, Mapping[int, RunFolder]]) -> Scores:
    """Column -> seed -> score, by the task's own metric."""
    return {
        column: {seed: 100 * run.metrics("test")[metric_of(column)] for seed, run in some.items()}
        for column, some in runs.items()
    }


def metric_of(column: str) -> str:
    return TASKS["rte" if column == FROM_RUN else column].metric


def means_of(scores: Scores, columns: Sequence[str]) -> dict[int, float]:
    """Mean over tasks by seed, for repeats that have all of them."""
    if not columns or any(column not in scores for column in columns):
        return {}
    seeds = set.intersection(*(set(scores[column]) for column in columns))
    return {seed: statistics.fmean(scores[column][seed] for column in columns) for seed in sorted(seeds)}


# -- the paper's Table 3 ----------------------------------------------------------------------------------------------


def write_glue(study: Pretrainings, results: Path) -> None:
    """Write the scores of every method after all tokens."""
    last = [model for model in study.models() if model.is_last]
    runs = {method: runs_of(study, [m for m in last if m.method == method]) for method in study.methods}
    runs = {method: columns for method, columns in runs.items() if columns}
    if not runs:
        print("glue: no table, no fine-tuning from a last model has finished")
        return
    systems = [
        system_of(METHODS[method], [run.path for some in columns.values() for run in some.values()])
        for method, columns in runs.items()
    ]
    scores = {method: scores_of(columns) for method, columns in runs.items()}
    lines = [as_markdown(systems), ""]
    data: dict[str, Any] = {"tokens": study.tokens, "about": _about(runs), "systems": {}, "collapsed": {}}
    for method in runs:
        for seed, tokens in collapsed(study, method).items():
            lines += [f"**{METHODS[method]}, seed {seed}: the pre-training collapsed after {tokens:,} tokens.**", ""]
            data["collapsed"].setdefault(method, {})[seed] = tokens
    for each, method in zip(systems, runs, strict=True):
        means = {name: means_of(scores[method], columns) for name, columns in averaged(study).items()}
        lines += [f"{METHODS[method]}, {name}: {tables.cell(list(x.values()))}.  " for name, x in means.items() if x]
        data["systems"][method] = dataclasses.asdict(each) | {"scores": scores[method], "means": means}
    if BASELINE in runs:
        against = {m: differences(study, columns, runs[BASELINE]) for m, columns in runs.items() if m != BASELINE}
        for method, compared in against.items():
            lines += ["", f"{METHODS[method]} minus {METHODS[BASELINE]}:", ""]
            lines += [f"- {_title(name)}: {_format(comparison)}" for name, comparison in compared.items()]
        data["against"] = {
            method: {name: dataclasses.asdict(comparison) for name, comparison in compared.items()}
            for method, compared in against.items()
        }
    print("\n".join(["", *lines]), flush=True)
    save(results / "glue.md", "\n".join(["# GLUE", "", f"After {study.tokens:,} tokens.", "", HEAD, *lines]) + "\n")
    save(results / "glue.json", data)


def collapsed(study: Pretrainings, method: str) -> dict[int, int]:
    """Seed -> number of tokens after which a pre-training collapsed to constant output, for those that did."""
    steps = tables.collapsed_in(study.folder(method, (), "pretrain"), study.seeds)
    return {seed: step * study.step_tokens for seed, step in steps.items()}


def averaged(study: Pretrainings) -> dict[str, list[str]]:
    """Name of a mean over tasks -> its columns."""
    means = {"mean": list(study.tasks)}
    if {"rte", "mnli"} <= set(study.tasks):
        means["mean, RTE from MNLI"] = [FROM_RUN if name == "rte" else name for name in study.tasks]
    return means


def differences(
    study: Pretrainings, ours: Mapping[str, Mapping[int, RunFolder]], theirs: Mapping[str, Mapping[int, RunFolder]]
) -> dict[str, Comparison]:
    """Column -> comparison of a method with the baseline, times 100; columns with too few runs are left out."""
    compared: dict[str, Comparison] = {}
    for column in ours:
        if column in theirs:
            comparison = _compare(ours[column], theirs[column], metric_of(column))
            if comparison is not None:
                compared[column] = comparison
    for name, columns in averaged(study).items():
        comparison = over_seeds(*(means_of(scores_of(runs), columns) for runs in (ours, theirs)))
        if comparison is not None:
            compared[name] = comparison
    return compared


def _compare(ours: Mapping[int, RunFolder], theirs: Mapping[int, RunFolder], metric: str) -> Comparison | None:
    try:
        entries = [
            ("", Path(), {seed: Evaluation(run.metrics("test"), run.items("test")) for seed, run in some.items()})
            for some in (theirs, ours)
        ]
        against = tables.table(entries)[1].against
    except RunError:  # stored predictions are large, and may not have been copied with the run
        against = {}
    if metric in against:
        return scaled(against[metric], 100)
    values = ({seed: 100 * run.metrics("test")[metric] for seed, run in some.items()} for some in (ours, theirs))
    return over_seeds(*values)


def _format(comparison: Comparison) -> str:
    size = f"{comparison.seeds} repeats" + (f" x {comparison.items} items" if comparison.items > 1 else "")
    interval = f"[{comparison.low:+.2f}, {comparison.high:+.2f}]"
    return f"{comparison.difference:+.2f} {interval}, p = {comparison.p_value:.3f} ({size})"


def _title(name: str) -> str:
    return name if name.startswith("mean") else title(name)


def _about(runs: Mapping[str, Mapping[str, Mapping[int, RunFolder]]]) -> dict[str, Any]:
    """Device, versions and training times of the fine-tunings."""
    first = next(run for columns in runs.values() for some in columns.values() for run in some.values())
    started = read_json(first.path / RUN)["started"]
    seconds: dict[str, list[float]] = {}
    for columns in runs.values():
        for column, some in columns.items():
            seconds.setdefault(column, []).extend((run.result or {})["seconds"] for run in some.values())
    about = {key: started[key] for key in ("device", "versions")}
    return about | {"seconds_a_run": {column: statistics.median(times) for column, times in seconds.items()}}


# -- learning curves ---------------------------------------------------------------------------------------------------


def write_curve(study: Pretrainings, results: Path) -> None:
    """Write scores against tokens: of the discriminator on the development set, and of fine-tunings."""
    data: dict[str, Any] = {}
    drawn: dict[str, list[list[tuple[float, float]]]] = {}
    for method in study.methods:
        by_seed: dict[int, list[tuple[float, float]]] = {}
        points = []
        shares = sorted({model.share for model in study.models() if model.method == method})
        for share in shares:
            models = [m for m in study.models() if m.method == method and m.share == share]
            scores = scores_of(runs_of(study, models))
            tokens, means = study.tokens_at(share), means_of(scores, study.tasks)
            if scores:
                points.append({"tokens": tokens, "scores": scores, "means": means})
            for seed, mean in means.items():
                by_seed.setdefault(seed, []).append((tokens / 1e6, mean))
        pretraining = _dev_curves(study, method)
        if points or pretraining:
            data[method] = {"points": points, "pretraining": pretraining}
        if complete := [curve for curve in by_seed.values() if len(curve) == len(shares)]:
            drawn[METHODS[method]] = complete
    if not data:
        print("curve: no figure, no pre-training has started")
        return
    save(results / "curve.json", data)
    charts = [learning_curve("mean of GLUE", drawn, "curve")] if drawn else []
    for metric in ("auc", "nll"):
        curves = {}
        for method, of_method in data.items():
            if some := of_method["pretraining"].get(metric):
                curves[METHODS[method]] = [[(tokens / 1e6, y) for tokens, y in points] for points in some.values()]
        name = f"{metric.upper()} of the development set"
        charts += [learning_curve(name, curves, f"pretraining-{metric}")] if curves else []
    losses = {METHODS[method]: _losses(study, method) for method in data}
    charts += [learning_curve("training loss", losses, "pretraining-loss")] if any(losses.values()) else []
    write_svgs([dataclasses.replace(chart, x_name="million tokens") for chart in charts], results)


def _dev_curves(study: Pretrainings, method: str) -> dict[str, dict[int, list[tuple[float, float]]]]:
    """Metrics of the development set: name -> seed -> (tokens, value)."""
    curves: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for spec in study.specs(method, (), study.seeds, "pretrain"):
        run = RunFolder(spec.folder)
        for metric in ("auc", "nll", "accuracy", "generator_nll"):
            if points := run.curve("dev", metric):
                by_tokens = [(step * study.step_tokens, value) for step, value in points]
                curves.setdefault(metric, {})[spec.recipe.seed] = by_tokens
    return curves


def _losses(study: Pretrainings, method: str) -> list[list[tuple[float, float]]]:
    """(million tokens, training loss) of every seed, without the first steep fall."""
    runs = [RunFolder(spec.folder) for spec in study.specs(method, (), study.seeds, "pretrain")]
    points = [[(step * study.step_tokens / 1e6, loss) for step, loss in run.curve("train", "loss")] for run in runs]
    return [curve[len(curve) // 20 :] for curve in points if curve]


# -- heads ------------------------------------------------------------------------------------------------------------

SPACES = ("weights", "attention", "outputs")
ABOUT_HEADS = """\
Means over pairs of heads of a layer, over layers and seeds: their cosine, and N, the effective number of heads, of
their weights (q, k and v separately), their attention and their outputs. Increase of the NLL of the development set
when a head is removed: mean and largest. Last, the mean cosine between two tokens of a block in the output of all
heads; at 1 all tokens are equal.
"""
SHOWN = {"cosine": "cosine", "effective_heads": "N"}


def write_heads(study: Pretrainings, results: Path) -> None:
    """Write similarity and redundancy of heads, from the measurements of the stage `heads`."""
    files = {model: heads_file(study, model) for model in study.models()}
    measured = {model: read_json(file) for model, file in files.items() if file.is_file()}
    if not measured:
        print("heads: no table, no model has been measured")
        return
    titles = ["method", "tokens", "layers", *(f"{what}, {space}" for space in SPACES for what in SHOWN.values())]
    titles += ["NLL without a head", "largest", "cosine, tokens"]
    rows = []
    for method in study.methods:
        for share in sorted({model.share for model in measured if model.method == method}, reverse=True):
            some = [facts for model, facts in measured.items() if (model.method, model.share) == (method, share)]
            for which, chosen in (("first", slice(0, 1)), ("all", slice(None))):
                cells = [f"{_mean(some, space, what, chosen):.3f}" for space in SPACES for what in SHOWN]
                lost = [x["nll"] for facts in some for x in facts["without"] if which == "all" or not x["layer"]]
                cells += [f"{statistics.fmean(lost):+.5f}", f"{max(lost):+.5f}"]
                tokens = _mean(some, "outputs", "tokens", chosen)
                cells += ["not measured" if math.isnan(tokens) else f"{tokens:.3f}"]
                rows.append([METHODS[method], f"{study.tokens_at(share):,}", which, *cells])
    table = format_table(titles, rows)
    print(f"\n{table}", flush=True)
    save(results / "heads.md", "\n".join(["# Heads", "", ABOUT_HEADS, table]) + "\n")
    save(results / "heads.json", {model.name: facts for model, facts in measured.items()})


def _mean(some: Sequence[Mapping[str, Any]], space: str, what: str, layers: slice) -> float:
    values = [layer[what] for facts in some for layer in facts.get(space, [])[layers] if what in layer]
    return statistics.fmean(values) if values else float("nan")
