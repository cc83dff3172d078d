"""From runs to verdicts. No verdict is written by hand: each follows from an interval."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.scores import COMPARED, TOTALLED
from repulsive.lab.engine.tables import table
from repulsive.lab.engine.task import Evaluation
from repulsive.lab.paper.published import Claim
from repulsive.lab.runs.results import SIGNIFICANT
from repulsive.metrics.compare import Comparison, compare

CONFIRMED, NOT_CONFIRMED, NOT_TESTED = "confirmed", "not confirmed", "not tested on the same data"
SCALE = {"accuracy": 100.0, "matthews": 100.0, "spearman": 100.0}  # as the paper prints them
NAMES = {"METEOR": "METEOR 1.5"}  # other implementations have another scale
_OTHERS = ("labels", "nll", "correct", "squared_error")  # tell whether two runs answered the same items
Runs = Mapping[int, RunFolder]


@dataclass(frozen=True)
class Finding:
    """What became of a claim.

    Args:
        claim: the claim.
        verdict: one of the three.
        why: the reason, in a few words.
        here: what the interval says about these runs, whatever the data: "higher", "lower", "no difference told", or
            "" where there is none.
        seen: first - second.
    """

    claim: Claim
    verdict: str
    why: str
    here: str = ""
    seen: Comparison | None = None


def values(runs: Runs, metric: str, part: str = "test") -> dict[int, float]:
    """A metric seed by seed, in the paper's units; nothing where a run does not have it."""
    name = NAMES.get(metric, metric)
    found = {seed: run.metrics(part).get(name) for seed, run in runs.items()}
    return {seed: SCALE.get(metric, 1.0) * float(x) for seed, x in found.items() if x is not None}


def difference(first: Runs, second: Runs, metric: str, part: str = "test") -> Comparison | None:
    """First - second in the paper's units, paired by seed and, where the metric is made of items, by item.

    None where the two share no seed, or have the metric of one seed only and no items.
    """
    array = TOTALLED[metric][0] if metric in TOTALLED else COMPARED.get(metric)
    if array is not None:
        answers = [_reduced(runs, metric, array, part) for runs in (second, first)]
        if all(answers):
            compared = table([("", Path(), each) for each in answers])[1].against
            if metric in compared:
                return scaled(compared[metric], SCALE.get(metric, 1.0))
    return over_seeds(values(first, metric, part), values(second, metric, part))


def over_seeds(first: Mapping[int, float], second: Mapping[int, float]) -> Comparison | None:
    """First - second of numbers that are the mean of nothing, paired by seed; None with fewer than two."""
    shared = sorted(first.keys() & second.keys())
    if len(shared) < 2:
        return None
    a, b = (torch.tensor([[each[seed]] for seed in shared], dtype=torch.float64) for each in (first, second))  # [S, 1]
    return compare(a, b, "seeds")


def scaled(found: Comparison, factor: float) -> Comparison:
    """The same in other units."""
    return replace(found, difference=factor * found.difference, low=factor * found.low, high=factor * found.high)


def judge(claim: Claim, seen: Comparison | None, other: str, missing: str = "") -> Finding:
    """The verdict on a claim.

    A difference counts where its interval is free of zero and its p-value no larger than 0.05, as everywhere in this
    package; one seed says nothing about new runs. p is nan where there is no test, and then the interval decides.

    Args:
        claim: the claim.
        seen: first - second; None where it could not be had.
        other: why the data are not the paper's; "" where they are.
        missing: why there is no difference.
    """
    if seen is None:
        return Finding(claim, NOT_TESTED, missing or "not run, or one seed and no items to resample")
    sure = (math.isnan(seen.p_value) or seen.p_value <= SIGNIFICANT) and (seen.low > 0 or seen.high < 0)
    here = ("higher" if seen.difference > 0 else "lower") if sure else "no difference told"
    if claim.better == "same":
        inside = -claim.within <= seen.low and seen.high <= claim.within
        here = f"within ±{claim.within:g}" if inside else f"not within ±{claim.within:g}"
        holds = inside
    else:
        holds = here == claim.better
    if other:
        return Finding(claim, NOT_TESTED, other, here, seen)
    if seen.seeds < 2 and seen.over == "items":
        return Finding(claim, NOT_CONFIRMED, "one seed says nothing about new runs", here, seen)
    return Finding(claim, CONFIRMED if holds else NOT_CONFIRMED, _why(seen, sure), here, seen)


def _why(seen: Comparison, sure: bool) -> str:
    least = 2 ** (1 - seen.seeds)
    if not sure and seen.over in ("seeds", "both") and least > SIGNIFICANT:
        return f"with {seen.seeds} seeds p cannot fall below {least:g}"
    return "" if math.isnan(seen.p_value) else f"p = {seen.p_value:.3f}"


def _reduced(runs: Runs, metric: str, array: str, part: str) -> dict[int, Evaluation]:
    """What `table` needs of the answers to compare one metric; nothing where a run does not have it."""
    found = {}
    for seed, run in runs.items():
        if not (run.path / f"{part}.safetensors").is_file():
            return {}
        items, metrics = run.items(part), run.metrics(part)
        if array not in items or metric not in metrics:
            return {}
        kept = {name: items[name] for name in (array, *_OTHERS) if name in items}
        others = [name for name in COMPARED.values() if name in kept and name != array]
        for name in others[1:] if metric in TOTALLED else others:  # one is enough to tell items apart
            del kept[name]
        found[seed] = Evaluation({metric: metrics[metric]}, kept)
    return found
