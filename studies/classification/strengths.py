"""Part `strengths` of the study `follow_up`: several strengths of every method at plain attention's settings.

A trial of `paper_sizes` has one strength, so every learning rate is tried with one strength only. Here each method
tries `COUNT` strengths with the learning rate, dropout and weight decay that were chosen for plain attention, and plain
attention as many weight decays. The best by mean NLL on the development set gets final runs, if it is better than the
first choice. The control `kernel-free` has no first choice.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from studies.classification.lean_runs import STRENGTH_FINAL, Job
from studies.classification.search_space import BASELINE, FIRST, WIDE
from studies.classification.sizes_study import Study
from studies.tuning.choices import FINAL, REFINE, REFINE_SEEDS, mean_losses
from studies.tuning.seed_differences import Run, differences_of, format_interval, labels_of, tests_of
from studies.tuning.space import as_settings

from repulsive.safety.markdown import format_table

STRENGTH, COUNT = "strength", 6
CONTROL_ARM = "kernel-free"
SHOWN = {"accuracy": ("accuracy %", 2, 100), "nll": ("NLL", 4, 1), "overlap": ("overlap", 3, 1)}


def tried(arm: str, trials: int, chosen: int) -> list[tuple[str, ...]]:
    """List the points of an arm: strengths, evenly spaced in the logarithm; for plain attention weight decays.

    Args:
        arm: name of the arm.
        trials: number of trials of `paper_sizes`.
        chosen: trial that was chosen for plain attention.
    """
    settings = FIRST.trials(arm, trials)[chosen]  # those in the common ranges are the same for all arms
    varied = WIDE.own[arm][0] if WIDE.own[arm] else WIDE.common[-1]  # the strength, or the weight decay
    values = [varied.value((number + 0.5) / COUNT) for number in range(COUNT)]
    kept = [setting for setting in settings if not setting.startswith(f"{varied.key}=")]
    return [(*kept, f"{varied.key}={value}") for value in values]


def strength_jobs(studies: Mapping[str, Study]) -> Iterator[tuple[Study, Job]]:
    """Yield the runs of this part, as far as results determine them."""
    for seed in REFINE_SEEDS:
        for study in studies.values():
            for arm, points in _points(study).items():
                for number, point in enumerate(points):
                    yield from ((study, job) for job in study.make_jobs(STRENGTH, arm, number, point, [seed]))
    for study in studies.values():
        points = _points(study)
        better = {arm: best for arm in points if (best := chosen_strength(study, arm)) is not None}
        for seed in study.final_seeds():
            for arm, best in better.items():
                jobs = study.make_jobs(STRENGTH_FINAL, arm, best, points[arm][best], [seed])
                yield from ((study, job) for job in jobs)


def _points(study: Study) -> dict[str, list[tuple[str, ...]]]:
    trials, chosen = study.arguments.trials, study.all_chosen()
    arms = [*study.arms, *([] if CONTROL_ARM in study.arms else [CONTROL_ARM])]
    return {arm: tried(arm, trials, chosen[BASELINE]) for arm in arms}


def chosen_strength(study: Study, arm: str) -> int | None:
    """Return the best point of an arm; None until all have ended, or if the first choice is as good."""
    return study.better_than_chosen(arm, STRENGTH, COUNT * len(REFINE_SEEDS))


def summarize_strengths(runs: Sequence[Run]) -> dict[str, Any]:
    """Return arm -> its points with their NLL on the development set, and its results where it has final runs.

    Args:
        runs: records of one dataset.
    """
    rows: dict[str, Any] = {}
    plain = tests_of(runs, BASELINE, STRENGTH_FINAL) or tests_of(runs, BASELINE, FINAL)
    for arm in dict.fromkeys(run["arm"] for run in runs if run["stage"] == STRENGTH):
        own = [run for run in runs if run["arm"] == arm]
        tuned = [run for run in own if run["stage"] == STRENGTH]
        losses = mean_losses(tuned)
        settings = {run["trial"]: as_settings(run["changes"][-1:]) for run in tuned}  # the last change is the strength
        points = [{**settings[number], "nll": losses[number]} for number in sorted(settings)]
        row: dict[str, Any] = {"label": labels_of(own)[arm], "key": next(iter(points[0])), "points": points}
        first = mean_losses([run for run in own if run["stage"] == REFINE])
        row["first"] = min(first.values(), default=math.nan)
        if tests := tests_of(runs, arm, STRENGTH_FINAL):
            row["seeds"] = sorted(tests)
            row["means"] = {metric: statistics.fmean(test[metric] for test in tests.values()) for metric in SHOWN}
            row["against_plain"] = differences_of(tests, plain, SHOWN)
        rows[arm] = row
    return rows


def strength_lines(rows: Mapping[str, Any]) -> list[str]:
    """Format the two tables of this part."""
    tuned, tested = [], []
    for arm, row in rows.items():
        points = ", ".join(f"{point[row['key']]:g}: {point['nll']:.4f}" for point in row["points"])
        first = "" if math.isnan(row["first"]) else f"{row['first']:.4f}"
        tuned.append([row["label"], row["key"].partition(".")[2], points, first])
        if "means" in row:
            means = [f"{row['means'][name] * factor:.{digits}f}" for name, (_, digits, factor) in SHOWN.items()]
            differences = row["against_plain"] if arm != BASELINE else {}
            cells = [format_interval(differences[n], d, f) if differences else "" for n, (_, d, f) in SHOWN.items()]
            tested.append([row["label"], str(len(row["seeds"])), *means, *cells])
    head = ["method", "setting", "values and their NLL on the development set", "first choice"]
    titles = [title for title, _, _ in SHOWN.values()]
    about = (
        "Every method with the learning rate, dropout and weight decay that were chosen for plain attention, and other "
        "strengths; plain attention with other weight decays. Mean of three seeds."
    )
    lines = [about, "", format_table(head, tuned), ""]
    if not tested:
        return [*lines, "No method is better on the development set than with its first choice."]
    more = (
        "The best of these, if they are better on the development set than the first choice: test set, and differences "
        "from the best plain attention, with 95 % intervals over seeds."
    )
    return [*lines, more, "", format_table(["method", "seeds", *titles, *(f"{t} minus MA" for t in titles)], tested)]
