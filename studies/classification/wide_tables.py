"""Tables of the study `follow_up`: the wider search."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from studies.classification.head_count_tables import ERRORS
from studies.classification.lean_runs import WIDE_FINAL
from studies.classification.search_space import BASELINE, OWN, WIDE
from studies.tuning.choices import FINAL
from studies.tuning.seed_differences import (
    Run,
    differences_of,
    format_interval,
    labels_of,
    tests_of,
)
from studies.tuning.space import as_settings

from repulsive.safety.markdown import format_table

SHOWN = (("accuracy", 2, 100), ("nll", 4, 1))  # metric, digits, factor


def summarize_wide(runs: Sequence[Run]) -> dict[str, Any]:
    """Return arm -> the choices of both searches, and the test results of the second where it has final runs.

    Args:
        runs: records of one dataset.
    """
    rows: dict[str, Any] = {}
    final = {arm: tests for arm in OWN if (tests := tests_of(runs, arm, FINAL))}
    for arm in (arm for arm in OWN if any(run["arm"] == arm for run in runs)):
        own = [run for run in runs if run["arm"] == arm]
        row: dict[str, Any] = {"label": labels_of(own)[arm]}
        for name, stages in (("first", ("screen", "refine")), ("wide", ("wide screen", "wide refine"))):
            losses = _losses(own, stages[1])
            row[name] = {"tried": len({run["trial"] for run in own if run["stage"] == stages[0]})}
            if losses:
                best = min(losses, key=lambda trial: (losses[trial], trial))
                run = next(run for run in own if run["stage"] == stages[1] and run["trial"] == best)
                settings = run["changes"][-len(WIDE.ranges(arm)) :]
                row[name] |= {"trial": best, "nll": losses[best], "settings": settings}
        if "settings" in row["wide"]:
            row["wide"]["at_edges"] = WIDE.at_edges(arm, row["wide"]["settings"])
        if tests := tests_of(runs, arm, WIDE_FINAL):
            row["against"] = {other: differences_of(tests, others, ERRORS) for other, others in final.items()}
            row["means"] = {m: statistics.fmean(t[m] for t in tests.values()) for m in ERRORS}
            row["seeds"] = sorted(tests)
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
    for arm, row in rows.items():
        first, wide = row["first"], row["wide"]
        values = as_settings(wide.get("settings", ()))
        edges = f"; near an end: {', '.join(wide['at_edges'])}" if wide.get("at_edges") else ""
        body.append(
            [
                row["label"],
                f"{first['nll']:.4f} ({first['tried']})" if "nll" in first else "",
                f"{wide['nll']:.4f} ({wide['tried']})" if "nll" in wide else f"({wide['tried']})",
                ", ".join(f"{key} {value:g}" for key, value in values.items()) + edges,
                *_final_cells(arm, row),
            ]
        )
    about = (
        "Lowest mean NLL on the development set in each search (number of trials). Arms whose second search found a "
        "lower one have final runs: test accuracy % (seeds), and differences from the final runs of the first choice "
        "and of plain attention, with 95 % intervals over seeds."
    )
    head = ["method", "first", "wide", "settings of wide", "accuracy %", "accuracy % minus first", "NLL minus first"]
    head.append("accuracy % minus MA")
    return [about, "", format_table(head, body)]


def _final_cells(arm: str, row: Mapping[str, Any]) -> list[str]:
    """Format the results on the test set, empty cells without final runs."""
    if "against" not in row:
        return [""] * 4
    first, plain = row["against"].get(arm), row["against"].get(BASELINE)
    return [
        f"{100 * row['means']['accuracy']:.2f} ({len(row['seeds'])})",
        *(format_interval(first[metric], digits, factor) if first else "" for metric, digits, factor in SHOWN),
        format_interval(plain["accuracy"], 2, 100) if plain else "",
    ]
