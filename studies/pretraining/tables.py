"""What the study of pre-training came to, as Markdown, JSON and figures."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from studies.engine import save
from studies.pretraining.heads import place
from studies.pretraining.rows import AFTER_MNLI, BASELINE, METHODS
from studies.translation.tables import draw

from repulsive.errors import RunError
from repulsive.lab.engine import tables
from repulsive.lab.engine.files import read_json
from repulsive.lab.engine.runs import RUN, RunFolder
from repulsive.lab.engine.task import Evaluation
from repulsive.lab.paper.verdicts import over_seeds, scaled
from repulsive.lab.systems.glue.data import TASKS
from repulsive.lab.systems.glue.table import FROM_RUN, as_markdown, system_of, title
from repulsive.metrics.compare import Comparison
from repulsive.pages.charts import learning_curve

if TYPE_CHECKING:
    from studies.pretraining.run import Export, Pretrainings

Scores = dict[str, dict[int, float]]  # column -> seed -> the task's own metric, times 100
HEAD = """\
Scores are those on the development sets, by each task's own metric, times 100, of the last weights: mean and standard
deviation over fine-tunings. Differences have a 95 % interval over repeats and items together; of Spearman's
correlation, of means over tasks and where items are not at hand over repeats alone. Repeats from one pre-training do
not say how much pre-trainings differ: studies/pretraining/combine.py compares several, each
of which counts once.
"""


def write_tables(study: Pretrainings, results: Path) -> None:
    """Everything there is."""
    glue(study, results)
    curve(study, results)
    heads(study, results)


def runs_of(study: Pretrainings, models: Sequence[Export]) -> dict[str, dict[int, RunFolder]]:
    """Fine-tunings from some models that have ended: column -> seed -> run."""
    found: dict[str, dict[int, RunFolder]] = {}
    for task in (*study.tasks, AFTER_MNLI):
        column = FROM_RUN if task == AFTER_MNLI else task
        for model in models:
            for seed, run in tables.runs_in(study.place(model, task)).items():
                if run.result is not None and seed in study.repeats(model):
                    found.setdefault(column, {})[seed] = run
    return found


def scores_of(runs: Mapping[str, Mapping[int, RunFolder]]) -> Scores:
    """The task's own metric of every run."""
    return {
        column: {seed: 100 * run.metrics("test")[metric_of(column)] for seed, run in some.items()}
        for column, some in runs.items()
    }


def metric_of(column: str) -> str:
    return TASKS["rte" if column == FROM_RUN else column].metric


def means_of(scores: Scores, columns: Sequence[str]) -> dict[int, float]:
    """Mean over tasks of every repeat that has all of them."""
    if not columns or any(column not in scores for column in columns):
        return {}
    seeds = set.intersection(*(set(scores[column]) for column in columns))
    return {seed: statistics.fmean(scores[column][seed] for column in columns) for seed in sorted(seeds)}


# -- the paper's table ------------------------------------------------------------------------------------------------


def glue(study: Pretrainings, results: Path) -> None:
    """Every method after all of its tokens."""
    last = [model for model in study.models() if model.last]
    runs = {method: runs_of(study, [m for m in last if m.method == method]) for method in study.methods}
    runs = {method: found for method, found in runs.items() if found}
    if not runs:
        print("glue: no table, no fine-tuning from a last model has ended")
        return
    systems = [
        system_of(METHODS[method], [run.path for some in found.values() for run in some.values()])
        for method, found in runs.items()
    ]
    scores = {method: scores_of(found) for method, found in runs.items()}
    lines = [as_markdown(systems), ""]
    written: dict[str, Any] = {"tokens": study.tokens, "about": _about(runs), "systems": {}, "collapsed": {}}
    for method in runs:
        for seed, tokens in collapsed(study, method).items():
            lines += [f"**{METHODS[method]}, seed {seed}: the pre-training collapsed after {tokens:,} tokens.**", ""]
            written["collapsed"].setdefault(method, {})[seed] = tokens
    for each, method in zip(systems, runs, strict=True):
        means = {name: means_of(scores[method], columns) for name, columns in averaged(study).items()}
        lines += [f"{METHODS[method]}, {name}: {tables.cell(list(x.values()))}.  " for name, x in means.items() if x]
        written["systems"][method] = dataclasses.asdict(each) | {"scores": scores[method], "means": means}
    if BASELINE in runs:
        against = {m: differences(study, found, runs[BASELINE]) for m, found in runs.items() if m != BASELINE}
        for method, found in against.items():
            lines += ["", f"{METHODS[method]} less {METHODS[BASELINE]}:", ""]
            lines += [f"- {_title(name)}: {_told(comparison)}" for name, comparison in found.items()]
        shown = {m: {name: dataclasses.asdict(c) for name, c in found.items()} for m, found in against.items()}
        written["against"] = shown
    print("\n".join(["", *lines]), flush=True)
    save(results / "glue.md", "\n".join(["# GLUE", "", f"After {study.tokens:,} tokens.", "", HEAD, *lines]) + "\n")
    save(results / "glue.json", written)


def collapsed(study: Pretrainings, method: str) -> dict[int, int]:
    """Seed -> the tokens after which a pre-training answered every input alike, of those that did."""
    steps = tables.collapsed_in(study.folder(method, (), "pretrain"), study.seeds)
    return {seed: step * study.step_tokens for seed, step in steps.items()}


def averaged(study: Pretrainings) -> dict[str, list[str]]:
    """Means over tasks -> which columns they are of."""
    plain = {"mean": list(study.tasks)}
    if {"rte", "mnli"} <= set(study.tasks):
        plain["mean, RTE from MNLI"] = [FROM_RUN if name == "rte" else name for name in study.tasks]
    return plain


def differences(
    study: Pretrainings, mine: Mapping[str, Mapping[int, RunFolder]], theirs: Mapping[str, Mapping[int, RunFolder]]
) -> dict[str, Comparison]:
    """Column -> how a method compares with the baseline, times 100; nothing where too little has ended."""
    found: dict[str, Comparison] = {}
    for column in mine:
        if column in theirs and (seen := _compared(mine[column], theirs[column], metric_of(column))) is not None:
            found[column] = seen
    for name, columns in averaged(study).items():
        means = [means_of(scores_of(runs), columns) for runs in (mine, theirs)]
        if (seen := over_seeds(*means)) is not None:
            found[name] = seen
    return found


def _compared(mine: Mapping[int, RunFolder], theirs: Mapping[int, RunFolder], metric: str) -> Comparison | None:
    try:
        entries = [
            ("", Path(), {seed: Evaluation(run.metrics("test"), run.items("test")) for seed, run in some.items()})
            for some in (theirs, mine)
        ]
        against = tables.table(entries)[1].against
    except RunError:  # answers are large, and may have stayed where the run was trained
        against = {}
    if metric in against:
        return scaled(against[metric], 100)
    values = ({seed: 100 * run.metrics("test")[metric] for seed, run in some.items()} for some in (mine, theirs))
    return over_seeds(*values)


def _told(found: Comparison) -> str:
    size = f"{found.seeds} repeats" + (f" x {found.items} items" if found.items > 1 else "")
    return f"{found.difference:+.2f} [{found.low:+.2f}, {found.high:+.2f}], p = {found.p_value:.3f} ({size})"


def _title(name: str) -> str:
    return name if name.startswith("mean") else title(name)


def _about(runs: Mapping[str, Mapping[str, Mapping[int, RunFolder]]]) -> dict[str, Any]:
    """Where and for how long fine-tunings were trained."""
    all_of_them = [run for found in runs.values() for some in found.values() for run in some.values()]
    started = read_json(all_of_them[0].path / RUN)["started"]
    seconds: dict[str, list[float]] = {}
    for found in runs.values():
        for column, some in found.items():
            seconds.setdefault(column, []).extend((run.result or {})["seconds"] for run in some.values())
    about = {key: started[key] for key in ("device", "versions")}
    return about | {"seconds_a_run": {column: statistics.median(times) for column, times in seconds.items()}}


# -- the curve --------------------------------------------------------------------------------------------------------


def curve(study: Pretrainings, results: Path) -> None:
    """What more tokens bring: to the discriminator on the development set, and to fine-tunings."""
    written: dict[str, Any] = {}
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
        pretraining = _pretraining(study, method)
        if points or pretraining:
            written[method] = {"points": points, "pretraining": pretraining}
        if whole := [found for found in by_seed.values() if len(found) == len(shares)]:
            drawn[METHODS[method]] = whole
    if not written:
        print("curve: no figure, no pre-training has begun")
        return
    save(results / "curve.json", written)
    charts = [learning_curve("mean of GLUE", drawn, "curve")] if drawn else []
    for metric in ("auc", "nll"):
        seen = {}
        for method, found in written.items():
            if some := found["pretraining"].get(metric):
                seen[METHODS[method]] = [[(tokens / 1e6, y) for tokens, y in points] for points in some.values()]
        name = f"{metric.upper()} of the development set"
        charts += [learning_curve(name, seen, f"pretraining-{metric}")] if seen else []
    losses = {METHODS[method]: _losses(study, method) for method in written}
    charts += [learning_curve("training loss", losses, "pretraining-loss")] if any(losses.values()) else []
    draw([dataclasses.replace(chart, x_name="million tokens") for chart in charts], results)


def _pretraining(study: Pretrainings, method: str) -> dict[str, dict[int, list[tuple[float, float]]]]:
    """Metrics of the development set: name -> seed -> (tokens, value)."""
    found: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for spec in study.specs(method, (), study.seeds, "pretrain"):
        run = RunFolder(spec.folder)
        for metric in ("auc", "nll", "accuracy", "generator_nll"):
            if points := run.curve("dev", metric):
                scaled = [(step * study.step_tokens, value) for step, value in points]
                found.setdefault(metric, {})[spec.recipe.seed] = scaled
    return found


def _losses(study: Pretrainings, method: str) -> list[list[tuple[float, float]]]:
    """(million tokens, training loss) of every seed, from when the first steep fall is over."""
    runs = [RunFolder(spec.folder) for spec in study.specs(method, (), study.seeds, "pretrain")]
    points = [[(step * study.step_tokens / 1e6, loss) for step, loss in run.curve("train", "loss")] for run in runs]
    return [seen[len(seen) // 20 :] for seen in points if seen]


# -- heads ------------------------------------------------------------------------------------------------------------

SPACES = ("weights", "attention", "outputs")
ABOUT_HEADS = """\
Means over pairs of heads of a layer, over layers and seeds: their cosine, and N, the effective number of heads; in
weights (q, k and v apart), in what they look at and in what leaves them. And by how much the NLL of the development set
rises without a head: mean and most. Last, the mean cosine of two tokens of a block in what leaves all heads: at 1 they
cannot be told apart any more.
"""
SHOWN = {"cosine": "cosine", "effective_heads": "N"}


def heads(study: Pretrainings, results: Path) -> None:
    """Diversity and redundancy of what `heads` has measured."""
    known = {model: read_json(place(study, model)) for model in study.models() if place(study, model).is_file()}
    if not known:
        print("heads: no table, nothing has been measured")
        return
    titles = ["", "tokens", "layers", *(f"{what}, {space}" for space in SPACES for what in SHOWN.values())]
    titles += ["NLL without a head", "most", "cosine, tokens"]
    lines = ["| " + " | ".join(titles) + " |", "|" + " --- |" * len(titles)]
    for method in study.methods:
        for share in sorted({model.share for model in known if model.method == method}, reverse=True):
            some = [found for model, found in known.items() if (model.method, model.share) == (method, share)]
            for which, chosen in (("first", slice(0, 1)), ("all", slice(None))):
                cells = [f"{_mean(some, space, what, chosen):.3f}" for space in SPACES for what in SHOWN]
                lost = [x["nll"] for found in some for x in found["without"] if which == "all" or not x["layer"]]
                cells += [f"{statistics.fmean(lost):+.5f}", f"{max(lost):+.5f}"]
                tokens = _mean(some, "outputs", "tokens", chosen)
                cells += ["not measured" if math.isnan(tokens) else f"{tokens:.3f}"]
                lines.append("| " + " | ".join([METHODS[method], f"{study.tokens_at(share):,}", which, *cells]) + " |")
    print("\n".join(["", *lines]), flush=True)
    save(results / "heads.md", "\n".join(["# Heads", "", ABOUT_HEADS, *lines]) + "\n")
    save(results / "heads.json", {model.name: found for model, found in known.items()})


def _mean(some: Sequence[Mapping[str, Any]], space: str, what: str, layers: slice) -> float:
    values = [layer[what] for found in some for layer in found.get(space, [])[layers] if what in layer]
    return statistics.fmean(values) if values else float("nan")
