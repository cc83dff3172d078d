"""Choose trials by their mean NLL on the development set."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

SCREEN, REFINE, FINAL, CONTROL = "screen", "refine", "final", "control"  # names of stages
SCREEN_SEEDS, REFINE_SEEDS = range(100, 101), range(101, 104)
REFINED = 3  # trials of each arm in the stage refine


def rank_trials(runs: Sequence[dict[str, Any]], wanted: int) -> list[int]:
    """List trials by mean NLL, the best first; empty until there are as many runs as wanted.

    Args:
        runs: records of one arm in one stage.
        wanted: number of runs of that stage.
    """
    if len(runs) < wanted:
        return []
    losses = mean_losses(runs)
    return sorted(losses, key=lambda trial: (losses[trial], trial))


def mean_losses(runs: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Return trial -> mean NLL on the development set; infinite if a run diverged."""
    losses: dict[int, list[float]] = {}
    for run in runs:
        losses.setdefault(run["trial"], []).append(dev_loss(run))
    return {trial: statistics.fmean(values) for trial, values in losses.items()}


def dev_loss(run: dict[str, Any]) -> float:
    """Return the NLL on the development set; infinite if the run failed."""
    loss = float(run["dev"]["nll"]) if "dev" in run else math.inf
    return math.inf if math.isnan(loss) else loss
