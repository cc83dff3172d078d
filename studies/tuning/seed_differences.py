"""Means and differences over the seeds of records, computed and formatted."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from repulsive.metrics.student import interval

Run = dict[str, Any]  # record of a run


def labels_of(runs: Sequence[Run]) -> dict[str, str]:
    """Return arm -> its label in tables; controls are left out."""
    known = [run for run in runs if "label" in run and "control_of" not in run]
    return {str(run.get("recipe", run["arm"])): str(run["label"]) for run in known}


def difference_of(first: Mapping[int, float], second: Mapping[int, float]) -> dict[str, Any]:
    """Return the mean difference over the seeds that both have, with a 95 % interval."""
    pairs = [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]
    low, high = interval(pairs) or (math.nan, math.nan)
    mean = statistics.fmean(pairs) if pairs else math.nan
    return {"difference": mean, "low": low, "high": high, "over": "seeds", "seeds": len(pairs)}


def tests_of(runs: Sequence[Run], arm: str, stage: str) -> dict[int, Mapping[str, float]]:
    """Return seed -> results of an arm on the test set."""
    return {run["seed"]: run["test"] for run in runs if (run["arm"], run["stage"]) == (arm, stage) and "test" in run}


def differences_of(
    first: Mapping[int, Mapping[str, float]], second: Mapping[int, Mapping[str, float]], metrics: Iterable[str]
) -> dict[str, Any]:
    """Return metric -> mean difference over the seeds that both have, with a 95 % interval."""
    return {
        metric: difference_of(*({seed: test[metric] for seed, test in tests.items()} for tests in (first, second)))
        for metric in metrics
    }


def format_interval(values: Mapping[str, Any], digits: int, factor: float = 1) -> str:
    mean, low, high = (factor * values[key] for key in ("difference", "low", "high"))
    if math.isnan(mean):
        return ""
    return f"{mean:+.{digits}f}" + (f" [{low:+.{digits}f}, {high:+.{digits}f}]" if not math.isnan(low) else "")


def format_gap(first: Mapping[int, float] | None, second: Mapping[int, float] | None, digits: int) -> str:
    return format_interval(difference_of(first, second), digits) if first and second else ""


def format_mean(by_seed: Mapping[int, float] | None, digits: int, count: str = " ({})") -> str:
    if not by_seed:
        return ""
    values = list(by_seed.values())
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}{count.format(len(values))}"
