"""Tables and figures of the study `follow_up`: entropy of predictions on own and foreign texts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from studies.classification.lean_runs import ENTROPY, ENTROPY_NATS
from studies.classification.search_space import BASELINE, OWN
from studies.tuning.seed_differences import (
    Run,
    difference_of,
    format_interval,
    format_mean,
    labels_of,
)

from repulsive.diagnostics.uncertainty import EntropyCDF
from repulsive.metrics.compare import compare
from repulsive.pages import Chart
from repulsive.pages.charts import entropy_chart
from repulsive.safety.markdown import format_table

FOREIGN = {  # value of a record -> title, digits and factor
    "accuracy": ("accuracy %", 2, 100),
    "own_entropy": ("entropy, own texts", 3, 1),
    "foreign_entropy": ("entropy, foreign texts", 3, 1),
    "auroc": ("AUROC", 3, 1),
}
CLASSES, POINTS = 5, 101  # of yelp; of a curve


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
            row["against_plain"] = {name: difference_of(values[arm][name], plain[name]) for name in FOREIGN}
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
    labels, first = labels_of(runs), runs[0]
    head = ["method", "seeds", *(title for title, _, _ in FOREIGN.values())]
    body = []
    for arm, row in rows.items():
        cells = [
            format_mean({s: f * x for s, x in row["values"][n].items()}, d, "") for n, (_, d, f) in FOREIGN.items()
        ]
        body.append([labels[arm], str(len(row["values"]["auroc"])), *cells])
    for arm, row in rows.items():
        if differences := row.get("against_plain"):
            cells = [format_interval(differences[n], d, f) for n, (_, d, f) in FOREIGN.items()]
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
    labels, seeds = labels_of(runs), {arm: [run["seed"] for run in runs if run["arm"] == arm] for arm in OWN}
    curves = {labels[arm]: entropy_curve(_stored(arrays, arm, each, kind)) for arm, each in seeds.items() if each}
    return entropy_chart(f"Entropy on {kind} texts", curves, file=f"entropy-{kind}")


def entropy_curve(entropies: torch.Tensor) -> EntropyCDF:
    """Compute the empirical distribution function of stored entropies, of any shape, from 0 to ln(classes)."""
    grid = torch.linspace(0, math.log(CLASSES), POINTS, dtype=torch.float64)
    ordered = entropies.flatten().clamp(max=float(grid[-1])).sort().values
    return EntropyCDF(grid, torch.searchsorted(ordered, grid, right=True).double() / len(ordered))


def _stored(arrays: Mapping[str, np.ndarray], arm: str, seeds: Sequence[int], kind: str) -> torch.Tensor:
    names = [f"{ENTROPY}/{arm}/{seed}/{kind}_entropy" for seed in seeds]
    return ENTROPY_NATS * torch.stack([torch.from_numpy(arrays[name].astype(float)) for name in names])  # [S, N]
