"""Tables of the study `paper_sizes`: tuned settings, test results, differences from plain attention, controls."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from studies.classification.controls import EXPLANATION
from studies.classification.search_space import BASELINE, COMMON, FIRST, OWN
from studies.classification.sizes_figure import draw_figure
from studies.output import save
from studies.tuning.choices import CONTROL, FINAL, REFINE, SCREEN
from studies.tuning.space import as_settings

from repulsive.metrics.compare import compare
from repulsive.metrics.student import interval
from repulsive.safety.markdown import format_table

Run = dict[str, Any]
STAGES = (SCREEN, REFINE, FINAL, CONTROL)  # other stages have tables of their own
SHOWN = {  # metric of a record -> title, digits and factor
    "accuracy": ("accuracy %", 2, 100),
    "nll": ("NLL", 4, 1),
    "scaled_nll": ("NLL, scaled", 4, 1),
    "ece15": ("ECE %", 2, 100),
    "scaled_ece15": ("ECE %, scaled", 2, 100),
    "oe15": ("OE %", 2, 100),
    "scaled_oe15": ("OE %, scaled", 2, 100),  # older records do not have it
    "overlap": ("overlap", 3, 1),
    "dist": ("Dist", 3, 1),
    "relative_dist": ("relative Dist", 3, 1),
}
BY_ITEM = ("accuracy", "nll")  # compared over seeds and items; the others over seeds alone
PAIRS = (("svgd", "frobenius"), ("spos", "frobenius"), ("cosine-smoothing", "frobenius"), ("spos", "svgd"))
RESULT = "paper_sizes"


def write_tables(runs: Sequence[Run], versions: Mapping[str, str], answers: Path | None, results: Path) -> str:
    """Write the tables of all datasets as Markdown and JSON, and their figure; return the Markdown.

    Args:
        runs: records of the runs.
        versions: versions of packages.
        answers: folder with `answers-DATASET.npz`, for intervals over items; None: over seeds alone.
        results: folder to write.
    """
    runs = [run for run in runs if run["stage"] in STAGES]
    texts, data = ["# Sentence classification at the paper's sizes", ""], {}
    for dataset in dict.fromkeys(run["dataset"] for run in runs):
        own = [run for run in runs if run["dataset"] == dataset]
        arrays = load_answers(answers / f"answers-{dataset}.npz") if answers else {}
        data[dataset] = {"versions": dict(versions)} | summarize(own, arrays)
        texts += [f"## {dataset}", "", *as_lines(data[dataset]), ""]
    text = "\n".join(texts)
    save(results / f"{RESULT}.md", text)
    save(results / f"{RESULT}.json", data)
    save(results / f"{RESULT}.svg", draw_figure(data))
    return text


def load_answers(path: Path) -> dict[str, np.ndarray]:
    """Load stored answers; empty without the file."""
    if not path.is_file():
        return {}
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


def summarize(runs: Sequence[Run], answers: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the summary of one dataset: all tried points, and for each arm its setting, results and differences.

    Args:
        runs: records of one dataset.
        answers: arrays of `answers-DATASET.npz`.
    """
    arms = [arm for arm in OWN if any(run["arm"] == arm for run in runs)]
    final = {arm: {run["seed"]: run for run in runs if _is(run, arm, FINAL) and "test" in run} for arm in arms}
    names = [name for name in SHOWN if all(name in run["test"] for run in runs if "test" in run)]
    rows = {}
    for arm in arms:
        done = final[arm]
        row: dict[str, Any] = {"label": _label(runs, arm), "tried": _tried(runs, arm), "seeds": sorted(done)}
        if done:
            first = next(iter(done.values()))
            own = _own_changes(first, arm)
            row |= {"settings": own, "at_edges": FIRST.at_edges(arm, own), "train": first["train"]}
            row["test"] = {name: _cell([run["test"][name] for run in done.values()]) for name in names}
            row["temperature"] = _cell([run["test"]["temperature"] for run in done.values()])
            row["best_epoch"] = _cell([run["best_epoch"] for run in done.values()])
            if arm != BASELINE and final.get(BASELINE):
                row["against_plain"] = _differences((arm, BASELINE), done, final[BASELINE], answers)
        row["failed"] = sum("failed" in run for run in runs if run["arm"] == arm)
        rows[arm] = row
    stages = dict.fromkeys(run["stage"] for run in runs)
    seconds = {stage: _cell([run["seconds"] for run in runs if run["stage"] == stage]) for stage in stages}
    devices = sorted({run["device"] for run in runs if "device" in run})
    between = {
        f"{first} minus {second}": _differences((first, second), final[first], final[second], answers)
        for first, second in PAIRS
        if final.get(first) and final.get(second)
    }
    summary = {"devices": devices, "runs": len(runs), "seconds": seconds, "arms": rows, "between": between}
    return summary | {"controls": _controls(runs, final, names, answers)}


def _controls(
    runs: Sequence[Run],
    final: Mapping[str, Mapping[int, Run]],
    names: Sequence[str],
    answers: Mapping[str, np.ndarray],
) -> dict[str, dict[str, Any]]:
    """Return control -> its results, its difference from plain attention, and the difference of each arm from it.

    Args:
        runs: records of one dataset.
        final: arm -> seed -> run of the stage `final`.
        names: metrics that all runs have.
        answers: arrays of `answers-DATASET.npz`.
    """
    rows = {}
    for name in dict.fromkeys(run["arm"] for run in runs if run["stage"] == CONTROL and "test" in run):
        done = {run["seed"]: run for run in runs if _is(run, name, CONTROL) and "test" in run}
        first = next(iter(done.values()))
        row: dict[str, Any] = {"label": first["label"], "changes": first["changes"], "train": first["train"]}
        row |= {"seeds": sorted(done), "failed": sum("failed" in run for run in runs if _is(run, name, CONTROL))}
        row["test"] = {metric: _cell([run["test"][metric] for run in done.values()]) for metric in names}
        row["best_epoch"] = _cell([run["best_epoch"] for run in done.values()])
        row["against_plain"] = _differences((name, BASELINE), done, final.get(BASELINE, {}), answers)
        arms = [arm for arm in first["control_of"] if arm in final]
        row["of"] = {arm: _differences((arm, name), final[arm], done, answers) for arm in arms}
        rows[name] = row
    return rows


def _is(run: Run, arm: str, stage: str) -> bool:
    return bool(run["arm"] == arm and run["stage"] == stage)


def _label(runs: Sequence[Run], arm: str) -> str:
    return str(next((run["label"] for run in runs if run["arm"] == arm and "label" in run), arm))


def _own_changes(run: Run, arm: str) -> list[str]:
    """Return the tuned settings of a run, which come last among its changes."""
    return list(run.get("changes", ())[-(len(COMMON) + len(OWN[arm])) :])


def _tried(runs: Sequence[Run], arm: str) -> list[dict[str, Any]]:
    """List every point of an arm with its NLL on the development set in each stage, the best first."""
    points: dict[int, dict[str, Any]] = {}
    for run in (run for run in runs if run["arm"] == arm and run["stage"] != FINAL):
        point = points.setdefault(run["trial"], {"trial": run["trial"], "settings": _own_changes(run, arm)})
        point.setdefault(run["stage"], []).append(run["dev"]["nll"] if "dev" in run else None)
    return sorted(points.values(), key=_rank)


def _rank(point: dict[str, Any]) -> tuple[bool, float]:
    losses = point.get("refine") or point.get("screen") or [None]
    known = [loss for loss in losses if loss is not None]
    return "refine" not in point, statistics.fmean(known) if len(known) == len(losses) else float("inf")


def _cell(values: Sequence[float]) -> dict[str, float | None]:
    return {
        "mean": statistics.fmean(values),
        "deviation": statistics.stdev(values) if len(values) > 1 else None,
    }


def _differences(
    names: tuple[str, str], first: Mapping[int, Run], second: Mapping[int, Run], answers: Mapping[str, np.ndarray]
) -> dict[str, dict[str, Any]]:
    """Return metric -> difference (first - second) with a 95 % interval, over the seeds that both have.

    Args:
        names: names of the two in `answers`.
        first: seed -> run.
        second: seed -> run.
        answers: arrays of `answers-DATASET.npz`.
    """
    seeds = sorted(first.keys() & second.keys())
    if len(seeds) < 2:
        return {}
    result: dict[str, dict[str, Any]] = {}
    for name in SHOWN:
        if not all(name in runs[seed]["test"] for seed in seeds for runs in (first, second)):
            continue
        pairs = [first[seed]["test"][name] - second[seed]["test"][name] for seed in seeds]
        ends = interval(pairs) or (float("nan"), float("nan"))
        result[name] = {"difference": statistics.fmean(pairs), "low": ends[0], "high": ends[1], "over": "seeds"}
    for name in BY_ITEM:
        try:
            ours, theirs = (_items(answers, which, seeds, name) for which in names)
        except KeyError:  # the answers of a run are missing: the interval over seeds stays
            continue
        both = compare(ours, theirs, "both")
        result[name] = {"difference": both.difference, "low": both.low, "high": both.high, "p": both.p_value}
        result[name] |= {"over": "seeds and items", "items": both.items}
    return {name: values | {"seeds": len(seeds)} for name, values in result.items()}


def _items(answers: Mapping[str, np.ndarray], arm: str, seeds: Sequence[int], metric: str) -> torch.Tensor:
    if metric == "nll":
        return torch.stack([torch.from_numpy(answers[f"{arm}/{seed}/nll"]).double() for seed in seeds])  # [S, N]
    labels = answers["labels"]
    return torch.stack([torch.from_numpy(answers[f"{arm}/{seed}/predicted"] == labels).double() for seed in seeds])


def as_lines(summary: Mapping[str, Any]) -> list[str]:
    """Format the summary of one dataset as Markdown lines."""
    rows = summary["arms"]
    done = {arm: row for arm, row in rows.items() if row["seeds"]}
    place = f"{', '.join(summary['devices'])}, torch {summary['versions'].get('torch', 'unknown')}"
    lines = [f"{summary['runs']} runs on {place}.", ""]
    if done:
        train = next(iter(done.values()))["train"]
        lines += [f"Test set, mean ± standard deviation over seeds; {train:,} training items.", ""]
        names = _names(done)
        head = ["method", "seeds", *(SHOWN[name][0] for name in names)]
        body = [[row["label"], str(len(row["seeds"])), *_cells(row["test"])] for row in done.values()]
        others = [row for row in done.values() if row.get("against_plain")]
        lines += [format_table(head, body), "", "Difference from plain attention, 95 % confidence interval:", ""]
        lines += [
            format_table(
                ["method", *head[2:]], [[row["label"], *_intervals(row["against_plain"], names)] for row in others]
            ),
            "",
        ]
        by_item = [name for name in BY_ITEM if others and others[0]["against_plain"][name]["over"] != "seeds"]
        titles = " and ".join(SHOWN[name][0].rstrip(" %") for name in by_item)
        paired = f"{titles[:1].upper()}{titles[1:]}: paired by seeds and items. Other columns: by seeds."
        lines += [paired if by_item else "Paired by seeds.", ""]
        pairs = [[_pair_title(pair, rows), *_intervals(values, names)] for pair, values in summary["between"].items()]
        if pairs:
            lines += ["Differences between methods, likewise:", "", format_table(["difference", *head[2:]], pairs), ""]
    lines += ["Settings with the lowest NLL on the development set, mean over the seeds of the stage `refine`:", ""]
    lines += [_setting_line(row) for row in rows.values()]
    return [*lines, *_control_lines(done, summary["controls"])] if summary["controls"] else lines


def _control_lines(arms: Mapping[str, Any], controls: Mapping[str, Any]) -> list[str]:
    """Format the section on controls.

    Args:
        arms: rows of the arms that have results.
        controls: rows of the controls.
    """
    names = _names(controls)
    head = ["control", "seeds", *(SHOWN[name][0] for name in names)]
    body = [[row["label"], str(len(row["seeds"])), *_cells(row["test"])] for row in controls.values()]
    lines = ["", "### Controls", "", EXPLANATION, "", format_table(head, body), ""]
    pairs = [
        [f"{arms[arm]['label']} minus {row['label']}", str(values["nll"]["seeds"]), *_intervals(values, names)]
        for row in controls.values()
        for arm, values in row["of"].items()
        if values
    ]
    pairs += [
        [f"{row['label']} minus {arms[BASELINE]['label']}", str(values["nll"]["seeds"]), *_intervals(values, names)]
        for row in controls.values()
        if (values := row["against_plain"])
    ]
    lines += ["Methods minus their controls, and controls minus plain attention, 95 % confidence interval:", ""]
    lines += [format_table(["difference", *head[1:]], pairs), ""]
    outcomes = [line for arm in arms for name in BY_ITEM if (line := _outcome(arm, name, arms, controls))]
    if not outcomes:
        return [*lines, "No method that has controls is significantly better than plain attention in accuracy or NLL."]
    intro = "Methods significantly better than plain attention, against their controls, each by its own 95 % interval:"
    return [*lines, intro, "", *outcomes]


def _outcome(arm: str, metric: str, arms: Mapping[str, Any], controls: Mapping[str, Any]) -> str:
    """Say how an arm that is better than plain attention compares with its controls; empty for other arms."""
    if _sign(arms[arm].get("against_plain", {}), metric) <= 0:
        return ""
    names: dict[int, list[str]] = {1: [], 0: [], -1: []}
    for row in controls.values():
        if row["of"].get(arm):
            names[_sign(row["of"][arm], metric)].append(f"`{row['label']}`")
    words = {1: "better than", 0: "no significant difference from", -1: "worse than"}
    parts = [f"{words[sign]} {', '.join(listed)}" for sign, listed in names.items() if listed]
    return f"- {arms[arm]['label']}, {SHOWN[metric][0].rstrip(' %')}: {'; '.join(parts)}" if parts else ""


def _sign(differences: Mapping[str, Any], metric: str) -> int:
    """Return 1 if the first is significantly better, -1 if it is worse, else 0."""
    if metric not in differences:
        return 0
    low, high = differences[metric]["low"], differences[metric]["high"]
    sign = 1 if low > 0 else -1 if high < 0 else 0
    return sign if metric == "accuracy" else -sign


def _names(rows: Mapping[str, Any]) -> list[str]:
    """List the metrics that rows have."""
    return list(next(iter(rows.values()))["test"])


def _pair_title(pair: str, rows: Mapping[str, Any]) -> str:
    """Return "SVGD minus MA + R" for "svgd minus frobenius"."""
    return " minus ".join(rows[arm]["label"] for arm in pair.split(" minus "))


def _cells(test: Mapping[str, Any]) -> list[str]:
    cells = []
    for name in test:
        _, digits, factor = SHOWN[name]
        mean, deviation = test[name]["mean"] * factor, test[name]["deviation"]
        cells.append(f"{mean:.{digits}f}" + (f" ± {deviation * factor:.{digits}f}" if deviation is not None else ""))
    return cells


def _intervals(differences: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    cells = []
    for name in names:
        _, digits, factor = SHOWN[name]
        values = differences.get(name)
        if values is None:
            cells.append("")
            continue
        d, low, high = (values[key] * factor for key in ("difference", "low", "high"))
        cells.append(f"{d:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]")
    return cells


def _setting_line(row: Mapping[str, Any]) -> str:
    best = row["tried"][0] if row["tried"] else None
    if best is None:
        return f"- {row['label']}: no trial has ended"
    losses = [loss for loss in best.get("refine") or best["screen"] if loss is not None]
    loss = f"{statistics.fmean(losses):.4f}" if losses else "diverged"
    values = ", ".join(f"{key} {value:g}" for key, value in as_settings(best["settings"]).items())
    edges = row.get("at_edges")
    note = f"; near the end of its range: {', '.join(edges)}" if edges else ""
    return f"- {row['label']}: {values} (NLL {loss}; {len(row['tried'])} trials{note})"
