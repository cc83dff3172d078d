"""Tables and figures of the study `follow_up`: errors against the number of heads."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from studies.classification.lean_runs import HEADS
from studies.classification.search_space import BASELINE, OWN
from studies.tuning.choices import FINAL
from studies.tuning.seed_differences import (
    Run,
    difference_of,
    format_gap,
    format_interval,
    format_mean,
    labels_of,
)

from repulsive.diagnostics.head_count import HeadCount, fit_heads
from repulsive.lab.paper.result_claims import name_count
from repulsive.pages import Chart
from repulsive.pages.charts import heads_chart
from repulsive.safety.markdown import format_table

USUAL_HEADS = 30  # of the final runs
ERRORS = {"accuracy": ("error %", 2), "nll": ("NLL", 4)}  # metric of a record -> name of its error, and digits


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


def head_lines(runs: Sequence[Run], points: Mapping[str, ByCount]) -> list[str]:
    """Format the tables of one dataset.

    Args:
        runs: records of the dataset.
        points: metric -> errors.
    """
    labels, lines = labels_of(runs), []
    for metric, (title, digits) in ERRORS.items():
        errors = points[metric]
        counts = sorted({count for each in errors.values() for count in each})
        head = ["method", *map(name_count, counts)]
        body = [[labels[arm], *(format_mean(each.get(m), digits) for m in counts)] for arm, each in errors.items()]
        plain = errors.get(BASELINE, {})
        body += [
            [
                f"{labels[arm]} minus {labels[BASELINE]}",
                *(format_gap(each.get(m), plain.get(m), digits) for m in counts),
            ]
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
        rows[arm] |= difference_of(errors[arm][best[arm]], errors[BASELINE][best[BASELINE]])
    return rows


def _best_lines(labels: Mapping[str, str], errors: ByCount, dev: ByCount, digits: int) -> list[str]:
    """Compare every method with plain attention, both with their best numbers of heads on the development set."""
    best = best_counts(errors, dev)
    names = {arm: f"{labels[arm]} with {name_count(row['heads'])}" for arm, row in best.items()}
    return [
        f"- {names[arm]} minus {names[BASELINE]}, error: {format_interval(row, digits)}"
        for arm, row in best.items()
        if "difference" in row
    ]


def _shape(label: str, errors: Mapping[int, Mapping[int, float]], dev: Mapping[int, Any], digits: int) -> str:
    """Compare the errors at both ends of a curve with that at the best number of heads on the development set."""
    best = _best_count(dev)
    ends = [end for end in (min(errors), max(errors)) if end != best]
    gaps = [f"error with {name_count(end)} minus that: {format_gap(errors[end], errors[best], digits)}" for end in ends]
    return "; ".join([f"- {label}: best on the development set with {name_count(best)}", *gaps])


def heads_figure(dataset: str, runs: Sequence[Run], metric: str, errors: ByCount) -> Chart:
    """Draw the error against the number of heads, as in Figure 3 of the paper."""
    labels = labels_of(runs)
    points = {
        labels[arm]: [HeadCount(count, tuple(by_seed.values())) for count, by_seed in each.items()]
        for arm, each in errors.items()
    }
    fits = {label: fit_heads(counts) for label, counts in points.items() if len(counts) >= 3}
    return heads_chart(points, fits, f"{dataset}: {ERRORS[metric][0]}", f"heads-{dataset}-{metric}")
