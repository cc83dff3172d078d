"""Tables and figures of the study `follow_up`: numbers of heads, entropy on foreign texts, wider search, maps.

Controls are in the tables of `paper_sizes`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from studies.classification.lean_runs import ENTROPY, ENTROPY_NATS, FINAL, HEADS, WIDE_FINAL
from studies.classification.search_space import BASELINE, OWN, WIDE, as_settings, at_edges
from studies.classification.sizes_tables import load_answers
from studies.output import save, write_content_svgs

from repulsive.diagnostics.head_count import HeadCount, fit_heads
from repulsive.diagnostics.uncertainty import EntropyCDF
from repulsive.metrics.compare import compare
from repulsive.metrics.student import interval
from repulsive.pages import Chart, Content, Example, Reading, write_report
from repulsive.pages.charts import entropy_chart, heads_chart
from repulsive.safety.markdown import format_table

Run = dict[str, Any]
RESULT = "follow_up"
USUAL_HEADS = 30  # of the final runs
ERRORS = {"accuracy": ("error %", 2), "nll": ("NLL", 4)}  # metric of a record -> name of its error, and digits
FOREIGN = {  # value of a record -> title, digits and factor
    "accuracy": ("accuracy %", 2, 100),
    "own_entropy": ("entropy, own texts", 3, 1),
    "foreign_entropy": ("entropy, foreign texts", 3, 1),
    "auroc": ("AUROC", 3, 1),
}
CLASSES, POINTS = 5, 101  # of yelp; of a curve


def write_follow_up(
    runs: Sequence[Run], versions: Mapping[str, str], out: Path, results: Path, *, with_items: bool
) -> str:
    """Write the tables as Markdown and JSON, and the figures; return the Markdown.

    Args:
        runs: records of the runs.
        versions: versions of packages.
        out: folder with `answers-DATASET.npz` and `maps`.
        results: folder to write.
        with_items: read the stored entropies, for intervals over items and for figures.
    """
    data: dict[str, Any] = {"versions": dict(versions)}
    lines = ["# Follow-up of sentence classification at the paper's sizes", ""]
    charts: list[Chart] = []
    for dataset in dict.fromkeys(run["dataset"] for run in runs if run["stage"] == HEADS):
        own = [run for run in runs if run["dataset"] == dataset]
        points = {metric: count_errors(own, metric) for metric in ERRORS}
        data[f"heads, {dataset}"] = points
        data[f"best heads, {dataset}"] = best_counts(points["accuracy"], count_errors(own, "accuracy", "dev"))
        lines += [f"## Number of heads: {dataset}", "", *head_lines(own, points), ""]
        charts += [heads_figure(dataset, own, metric, errors) for metric, errors in points.items()]
    for dataset in dict.fromkeys(run["dataset"] for run in runs if run["stage"] == ENTROPY and "foreign" in run):
        own = [run for run in runs if run["dataset"] == dataset and run["stage"] == ENTROPY and "foreign" in run]
        arrays = load_answers(out / f"answers-{dataset}.npz") if with_items else {}
        data[f"entropy, {dataset}"] = summary = summarize_entropy(own, arrays)
        lines += [f"## Entropy on foreign texts: {dataset}", "", *entropy_lines(own, summary), ""]
        charts += [entropy_figure(own, arrays, kind) for kind in ("own", "foreign") if arrays]
    wide = [run for run in runs if run["stage"].startswith("wide")]
    for dataset in dict.fromkeys(run["dataset"] for run in wide):
        own = [run for run in runs if run["dataset"] == dataset]
        data[f"wide, {dataset}"] = rows = summarize_wide(own)
        lines += [f"## Wider search: {dataset}", "", *wide_lines(rows), ""]
    examples = load_maps(out / "maps", _labels(runs))
    if examples:
        title = "Attention of all heads on reviews of the test set"
        lead = "One model of each method, all trained with the same seed (Figure 1 and appendix D of the paper)."
        write_report(results / RESULT / "maps.html", Content(title, lead, examples=examples))
        lines += ["## Attention maps", "", f"{RESULT}/maps.html: {len(examples)} reviews.", ""]
    if with_items and (charts or examples):
        (results / RESULT).mkdir(parents=True, exist_ok=True)
        write_content_svgs(Content("", charts=charts, examples=examples), results / RESULT)
    text = "\n".join(lines)
    save(results / f"{RESULT}.md", text)
    save(results / f"{RESULT}.json", data)
    return text


# -- numbers of heads -------------------------------------------------------------------------------------------

ByCount = dict[str, dict[int, dict[int, float]]]  # arm -> number of heads -> seed -> error


def count_errors(runs: Sequence[Run], metric: str, part: str = "test") -> ByCount:
    """Return arm -> number of heads -> seed -> error; with 30 heads it is that of the final run of the same seed.

    Args:
        runs: records of one dataset.
        metric: "accuracy", whose error is in percent, or "nll".
        part: "test" or "dev".
    """
    done = [run for run in runs if run["stage"] == HEADS and "test" in run]
    errors: ByCount = {}
    for run in done:
        count = int(dict(change.split("=", 1) for change in run["changes"])["model.heads"])
        errors.setdefault(run["recipe"], {}).setdefault(count, {})[run["seed"]] = _error(run, metric, part)
    seeds = {run["seed"] for run in done}
    for run in runs:
        if run["stage"] == FINAL and run["arm"] in errors and run["seed"] in seeds and "test" in run:
            errors[run["arm"]].setdefault(USUAL_HEADS, {})[run["seed"]] = _error(run, metric, part)
    ordered = [arm for arm in OWN if arm in errors]
    return {arm: dict(sorted(errors[arm].items())) for arm in ordered}


def _error(run: Run, metric: str, part: str) -> float:
    value = float(run[part][metric])
    return 100 * (1 - value) if metric == "accuracy" else value


def name_count(heads: int) -> str:
    """Return "1 head", "5 heads" and so on."""
    return f"{heads} head" + ("s" if heads > 1 else "")


def head_lines(runs: Sequence[Run], points: Mapping[str, ByCount]) -> list[str]:
    """Format the tables of one dataset.

    Args:
        runs: records of the dataset.
        points: metric -> errors.
    """
    labels, lines = _labels(runs), []
    for metric, (title, digits) in ERRORS.items():
        errors = points[metric]
        counts = sorted({count for each in errors.values() for count in each})
        head = ["method", *map(name_count, counts)]
        body = [[labels[arm], *(_mean(each.get(m), digits) for m in counts)] for arm, each in errors.items()]
        plain = errors.get(BASELINE, {})
        body += [
            [f"{labels[arm]} minus {labels[BASELINE]}", *(_gap(each.get(m), plain.get(m), digits) for m in counts)]
            for arm, each in errors.items()
            if arm != BASELINE and plain
        ]
        lines += [f"Test {title}: mean ± standard deviation (seeds); differences with 95 % intervals over seeds.", ""]
        lines += [format_table(head, body), ""]
        if metric == "accuracy":
            dev = count_errors(runs, metric, "dev")
            lines += [_shape(labels[arm], each, dev[arm], digits) for arm, each in errors.items()]
            lines += [*_best_lines(labels, errors, dev, digits), ""]
    return lines[:-1]


def _best_count(dev: Mapping[int, Mapping[int, float]]) -> int:
    """Return the number of heads with the lowest mean error on the development set."""
    return min(dev, key=lambda count: statistics.fmean(dev[count].values()))


def best_counts(errors: ByCount, dev: ByCount) -> dict[str, dict[str, Any]]:
    """Return arm -> its best number of heads on the development set, and the difference of its error from plain's.

    Plain attention has its own best number of heads.

    Args:
        errors: errors on the test set.
        dev: errors on the development set.
    """
    best = {arm: _best_count(dev[arm]) for arm in errors}
    rows: dict[str, dict[str, Any]] = {arm: {"heads": count} for arm, count in best.items()}
    for arm in (arm for arm in rows if arm != BASELINE and BASELINE in rows):
        rows[arm] |= _difference(errors[arm][best[arm]], errors[BASELINE][best[BASELINE]])
    return rows


def _best_lines(labels: Mapping[str, str], errors: ByCount, dev: ByCount, digits: int) -> list[str]:
    """Compare every method with plain attention, both with their best numbers of heads on the development set."""
    best = best_counts(errors, dev)
    names = {arm: f"{labels[arm]} with {name_count(row['heads'])}" for arm, row in best.items()}
    return [
        f"- {names[arm]} minus {names[BASELINE]}, error: {_interval(row, digits)}"
        for arm, row in best.items()
        if "difference" in row
    ]


def _shape(label: str, errors: Mapping[int, Mapping[int, float]], dev: Mapping[int, Any], digits: int) -> str:
    """Compare the errors at both ends of a curve with that at the best number of heads on the development set."""
    best = _best_count(dev)
    ends = [end for end in (min(errors), max(errors)) if end != best]
    gaps = [f"error with {name_count(end)} minus that: {_gap(errors[end], errors[best], digits)}" for end in ends]
    return "; ".join([f"- {label}: best on the development set with {name_count(best)}", *gaps])


def heads_figure(dataset: str, runs: Sequence[Run], metric: str, errors: ByCount) -> Chart:
    """Draw the error against the number of heads, as in Figure 3 of the paper."""
    labels = _labels(runs)
    points = {
        labels[arm]: [HeadCount(count, tuple(by_seed.values())) for count, by_seed in each.items()]
        for arm, each in errors.items()
    }
    fits = {label: fit_heads(counts) for label, counts in points.items() if len(counts) >= 3}
    return heads_chart(points, fits, f"{dataset}: {ERRORS[metric][0]}", f"heads-{dataset}-{metric}")


# -- entropy ----------------------------------------------------------------------------------------------------


def summarize_entropy(runs: Sequence[Run], arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return arm -> values by seed, and the difference of each from plain attention.

    Args:
        runs: records of the stage `entropy` on one dataset.
        arrays: stored entropies; empty: intervals over seeds alone.
    """
    values: dict[str, dict[str, dict[int, float]]] = {}
    for run in runs:
        for name in FOREIGN:
            value = (run["test"] if name == "accuracy" else run["foreign"])[name]
            values.setdefault(run["arm"], {}).setdefault(name, {})[run["seed"]] = value
    rows: dict[str, Any] = {}
    for arm in (arm for arm in OWN if arm in values):
        row: dict[str, Any] = {"values": values[arm]}
        if arm != BASELINE and BASELINE in values:
            plain = values[BASELINE]
            row["against_plain"] = {name: _difference(values[arm][name], plain[name]) for name in FOREIGN}
            seeds = sorted(values[arm]["auroc"].keys() & plain["auroc"].keys())
            if arrays and len(seeds) > 1:
                ours, theirs = (_stored(arrays, which, seeds, "foreign") for which in (arm, BASELINE))
                both = compare(ours, theirs, "both")
                row["against_plain"]["foreign_entropy"] = {
                    "difference": both.difference,
                    "low": both.low,
                    "high": both.high,
                    "over": "seeds and items",
                }
        rows[arm] = row
    return rows


def entropy_lines(runs: Sequence[Run], rows: Mapping[str, Any]) -> list[str]:
    """Format the table of entropies."""
    labels, first = _labels(runs), runs[0]
    head = ["method", "seeds", *(title for title, _, _ in FOREIGN.values())]
    body = []
    for arm, row in rows.items():
        cells = [_mean({s: f * x for s, x in row["values"][n].items()}, d, "") for n, (_, d, f) in FOREIGN.items()]
        body.append([labels[arm], str(len(row["values"]["auroc"])), *cells])
    for arm, row in rows.items():
        if differences := row.get("against_plain"):
            cells = [_interval(differences[n], d, f) for n, (_, d, f) in FOREIGN.items()]
            body.append([f"{labels[arm]} minus {labels[BASELINE]}", "", *cells])
    about = (
        f"Models trained on {first['train']:,} reviews, with seeds that no other stage uses; "
        f"{100 * first['foreign']['unknown']:.1f} % of the foreign words are unknown. Higher entropy on foreign texts "
        "is better; AUROC is the probability that a foreign text has higher entropy than an own one. Mean ± standard "
        "deviation over seeds; differences with 95 % intervals."
    )
    return [about, "", format_table(head, body)]


def entropy_figure(runs: Sequence[Run], arrays: Mapping[str, np.ndarray], kind: str) -> Chart:
    """Draw the empirical distribution of the entropy, all seeds pooled.

    Args:
        runs: records of the stage `entropy` on one dataset.
        arrays: stored entropies.
        kind: "own" or "foreign" texts.
    """
    labels, seeds = _labels(runs), {arm: [run["seed"] for run in runs if run["arm"] == arm] for arm in OWN}
    curves = {labels[arm]: entropy_curve(_stored(arrays, arm, each, kind)) for arm, each in seeds.items() if each}
    return entropy_chart(f"{kind.capitalize()} texts", curves, file=f"entropy-{kind}")


def entropy_curve(entropies: torch.Tensor) -> EntropyCDF:
    """Compute the empirical distribution function of stored entropies, of any shape, from 0 to ln(classes)."""
    grid = torch.linspace(0, math.log(CLASSES), POINTS, dtype=torch.float64)
    ordered = entropies.flatten().clamp(max=float(grid[-1])).sort().values
    return EntropyCDF(grid, torch.searchsorted(ordered, grid, right=True).double() / len(ordered))


def _stored(arrays: Mapping[str, np.ndarray], arm: str, seeds: Sequence[int], kind: str) -> torch.Tensor:
    names = [f"{ENTROPY}/{arm}/{seed}/{kind}_entropy" for seed in seeds]
    return ENTROPY_NATS * torch.stack([torch.from_numpy(arrays[name].astype(float)) for name in names])  # [S, N]


# -- wider search -----------------------------------------------------------------------------------------------


def summarize_wide(runs: Sequence[Run]) -> dict[str, Any]:
    """Return arm -> the choices of both searches, and the test results of the second where it has final runs.

    Args:
        runs: records of one dataset.
    """
    rows: dict[str, Any] = {}
    for arm in (arm for arm in OWN if any(run["arm"] == arm for run in runs)):
        own = [run for run in runs if run["arm"] == arm]
        row: dict[str, Any] = {"label": _labels(own)[arm]}
        for name, stages in (("first", ("screen", "refine")), ("wide", ("wide screen", "wide refine"))):
            losses = _losses(own, stages[1])
            row[name] = {"tried": len({run["trial"] for run in own if run["stage"] == stages[0]})}
            if losses:
                best = min(losses, key=lambda trial: (losses[trial], trial))
                run = next(run for run in own if run["stage"] == stages[1] and run["trial"] == best)
                settings = run["changes"][-len(WIDE.ranges(arm)) :]
                row[name] |= {"trial": best, "nll": losses[best], "settings": settings}
        if "settings" in row["wide"]:
            row["wide"]["at_edges"] = at_edges(arm, row["wide"]["settings"], WIDE)
        finals = {
            s: {r["seed"]: r["test"] for r in own if r["stage"] == s and "test" in r} for s in (FINAL, WIDE_FINAL)
        }
        if finals[WIDE_FINAL]:
            row["test"] = {
                metric: _difference(
                    *({s: t[metric] for s, t in finals[stage].items()} for stage in (WIDE_FINAL, FINAL))
                )
                for metric in ERRORS
            }
            row["means"] = {m: statistics.fmean(t[m] for t in finals[WIDE_FINAL].values()) for m in ERRORS}
            row["seeds"] = sorted(finals[WIDE_FINAL])
        rows[arm] = row
    return rows


def _losses(runs: Sequence[Run], stage: str) -> dict[int, float]:
    """Return trial -> mean NLL on the development set; infinite if a run failed."""
    losses: dict[int, list[float]] = {}
    for run in runs:
        if run["stage"] == stage:
            losses.setdefault(run["trial"], []).append(run["dev"]["nll"] if "dev" in run else math.inf)
    return {trial: statistics.fmean(values) for trial, values in losses.items()}


def wide_lines(rows: Mapping[str, Any]) -> list[str]:
    """Format the table of the wider search."""
    body = []
    for row in rows.values():
        first, wide = row["first"], row["wide"]
        values = as_settings(wide.get("settings", ()))
        edges = f"; near an end: {', '.join(wide['at_edges'])}" if wide.get("at_edges") else ""
        body.append(
            [
                row["label"],
                f"{first['nll']:.4f} ({first['tried']})" if "nll" in first else "",
                f"{wide['nll']:.4f} ({wide['tried']})" if "nll" in wide else f"({wide['tried']})",
                ", ".join(f"{key} {value:g}" for key, value in values.items()) + edges,
                f"{100 * row['means']['accuracy']:.2f} ({len(row['seeds'])})" if "test" in row else "",
                _interval(row["test"]["accuracy"], 2, 100) if "test" in row else "",
                _interval(row["test"]["nll"], 4, 1) if "test" in row else "",
            ]
        )
    about = (
        "Lowest mean NLL on the development set in each search (number of trials). Arms whose second search found a "
        "lower one have final runs: test accuracy % (seeds), and differences from the final runs of the first choice, "
        "with 95 % intervals over seeds."
    )
    head = ["method", "first", "wide", "settings of wide", "accuracy %", "accuracy % minus first", "NLL minus first"]
    return [about, "", format_table(head, body)]


# -- attention maps ---------------------------------------------------------------------------------------------


def load_maps(folder: Path, labels: Mapping[str, str]) -> list[Example]:
    """Combine the stored attention of all methods into examples; empty without files.

    Args:
        folder: folder of the files.
        labels: arm -> its label.
    """
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for arm in OWN:
        for path in sorted(folder.glob(f"*-{arm}-*.json"))[:1]:
            by_arm[arm] = json.loads(path.read_text())
    examples = []
    for same in zip(*by_arm.values(), strict=True):
        readings = [
            Reading(labels[arm], each["predicted"], each["probability"], each["attention"])
            for arm, each in zip(by_arm, same, strict=True)
        ]
        examples.append(Example(same[0]["tokens"], same[0]["label"], readings))
    return examples


# -- numbers ----------------------------------------------------------------------------------------------------


def _labels(runs: Sequence[Run]) -> dict[str, str]:
    """Return arm -> its label in tables; controls are left out."""
    known = [run for run in runs if "label" in run and "control_of" not in run]
    return {str(run.get("recipe", run["arm"])): str(run["label"]) for run in known}


def _difference(first: Mapping[int, float], second: Mapping[int, float]) -> dict[str, Any]:
    """Return the mean difference over the seeds that both have, with a 95 % interval."""
    pairs = [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]
    low, high = interval(pairs) or (math.nan, math.nan)
    mean = statistics.fmean(pairs) if pairs else math.nan
    return {"difference": mean, "low": low, "high": high, "over": "seeds", "seeds": len(pairs)}


def _interval(values: Mapping[str, Any], digits: int, factor: float = 1) -> str:
    mean, low, high = (factor * values[key] for key in ("difference", "low", "high"))
    if math.isnan(mean):
        return ""
    return f"{mean:+.{digits}f}" + (f" [{low:+.{digits}f}, {high:+.{digits}f}]" if not math.isnan(low) else "")


def _gap(first: Mapping[int, float] | None, second: Mapping[int, float] | None, digits: int) -> str:
    return _interval(_difference(first, second), digits) if first and second else ""


def _mean(by_seed: Mapping[int, float] | None, digits: int, count: str = " ({})") -> str:
    if not by_seed:
        return ""
    values = list(by_seed.values())
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}{count.format(len(values))}"
