"""Differences between the runs of two methods, in the paper's units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.scores import COMPARED, TOTALLED
from repulsive.lab.engine.tables import table
from repulsive.lab.engine.task import Evaluation
from repulsive.metrics.compare import Comparison, compare

SCALE = {"accuracy": 100.0, "matthews": 100.0, "spearman": 100.0}  # factors that give the paper's units
NAMES = {"METEOR": "METEOR 1.5"}  # the name says the version, because implementations have different scales
_IDENTIFYING = ("labels", "nll", "correct", "squared_error")  # arrays that show whether two runs share a test set
Runs = Mapping[int, RunFolder]  # seed -> run


def values(runs: Runs, metric: str, part: str = "test") -> dict[int, float]:
    """Return the values of a metric by seed, in the paper's units; runs that lack the metric are left out."""
    name = NAMES.get(metric, metric)
    by_seed = {seed: run.metrics(part).get(name) for seed, run in runs.items()}
    return {seed: SCALE.get(metric, 1.0) * float(value) for seed, value in by_seed.items() if value is not None}


def difference(first: Runs, second: Runs, metric: str) -> Comparison | None:
    """Compare two methods on the test set, first - second, paired by seed and, if the metric allows it, by item.

    Returns:
        None if they share no seed, or if there is only one seed and no items.
    """
    array = TOTALLED[metric][0] if metric in TOTALLED else COMPARED.get(metric)
    if array is not None:
        evaluations = [_needed_items(runs, metric, array) for runs in (second, first)]
        if all(evaluations):
            compared = table([("", Path(), each) for each in evaluations])[1].against
            if metric in compared:
                return scaled(compared[metric], SCALE.get(metric, 1.0))
    return over_seeds(values(first, metric), values(second, metric))


def over_seeds(first: Mapping[int, float], second: Mapping[int, float]) -> Comparison | None:
    """Compare one number per seed, first - second, paired by seed; None with fewer than two shared seeds."""
    shared = sorted(first.keys() & second.keys())
    if len(shared) < 2:
        return None
    a, b = (torch.tensor([[each[seed]] for seed in shared], dtype=torch.float64) for each in (first, second))  # [S, 1]
    return compare(a, b, "seeds")


def scaled(comparison: Comparison, factor: float) -> Comparison:
    """Convert a comparison to other units."""
    low, high = factor * comparison.low, factor * comparison.high
    return replace(comparison, difference=factor * comparison.difference, low=low, high=high)


def _needed_items(runs: Runs, metric: str, array: str) -> dict[int, Evaluation]:
    """Reduce stored predictions to what `table` needs to compare one metric; empty if a run lacks it."""
    evaluations = {}
    for seed, run in runs.items():
        if not (run.path / "test.safetensors").is_file():
            return {}
        items, metrics = run.items("test"), run.metrics("test")
        if array not in items or metric not in metrics:
            return {}
        kept = {name: items[name] for name in (array, *_IDENTIFYING) if name in items}
        others = [name for name in COMPARED.values() if name in kept and name != array]
        for name in others[1:] if metric in TOTALLED else others:  # one array suffices to identify the test set
            del kept[name]
        evaluations[seed] = Evaluation({metric: metrics[metric]}, kept)
    return evaluations
