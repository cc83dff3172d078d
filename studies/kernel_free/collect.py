"""Collect the measurements of all finished runs, as plain values for `runs.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from studies.kernel_free.measure import compare_losses, measure_arms
from studies.kernel_free.study import spec_of
from studies.kernel_free.systems import ARMS, PUBLISHED, System

from repulsive.lab.engine.runs import RunFolder

_SIZES = ("groups", "heads", "numbers")  # the same for all runs of a system
_COMPARED = ("difference", "low", "high", "over", "seeds", "items")


def collect(
    systems: Mapping[str, System], seeds: int, data: Path, out: Path, changes: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Measure every system that has finished runs; the arguments are those of `train`.

    Only seeds whose run with the published rule has finished are measured: distances are distances from it.

    Returns:
        system -> title, description, runs and comparisons of losses.
    """
    results = {}
    for name, system in systems.items():
        specs = {
            (arm, seed): spec_of(system, arm, seed, data, out, changes)
            for arm in ARMS
            for seed in range(system.seeds or seeds)
        }
        finished = {key: run for key, spec in specs.items() if (run := RunFolder(spec.folder)).result is not None}
        finished = {key: run for key, run in finished.items() if (PUBLISHED, key[1]) in finished}
        if finished:
            results[name] = _describe(system, finished, specs[PUBLISHED, 0].recipe.method)
    return results


def _describe(system: System, finished: Mapping[tuple[str, int], RunFolder], method: Any) -> dict[str, Any]:
    measured: list[dict[str, Any]] = []
    for seed in sorted({seed for _, seed in finished}):
        runs = {arm: finished[arm, seed] for arm in ARMS if (arm, seed) in finished}
        measured += [{"arm": arm, "seed": seed, **_rounded(x)} for arm, x in measure_arms(runs, method).items()]
    sizes = {key: measured[0][key] for key in _SIZES}
    measured = [{key: x for key, x in run.items() if key not in _SIZES} for run in measured]
    compared = [
        {"first": first, "second": second, **{key: dataclasses.asdict(result)[key] for key in _COMPARED}}
        for (first, second), result in compare_losses(finished).items()
    ]
    results = [run.result or {} for run in finished.values()]
    return {
        "title": system.title,
        "about": system.about,
        "steps": results[0]["steps"],
        "seconds": round(sum(result["seconds"] for result in results)),
        **sizes,
        "runs": measured,
        "comparisons": compared,
    }


def _rounded(measured: Mapping[str, Any]) -> dict[str, Any]:
    return {key: round(x, 6) if isinstance(x, float) else x for key, x in measured.items()}
