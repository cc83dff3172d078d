"""Tables of the study of equal tuning budgets: test results, differences from plain attention, settings, controls."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from studies.budget.study import STAGES, Records
from studies.budget.systems import System
from studies.output import save
from studies.tuning.choices import CONTROL, FINAL, REFINE, SCREEN, mean_losses
from studies.tuning.seed_differences import Run, difference_of, format_interval, format_mean
from studies.tuning.space import EDGE, as_settings

from repulsive.safety.markdown import format_table

NAME = "budget"
EXPLANATION = (
    "`PLAIN@ARM` is plain attention with the learning rate, dropout and weight decay that were chosen for ARM. "
    "`attraction` is the method with the sign of its force reversed. `wrong partner` gives every head the force of "
    "another head, in each step of a different one; the norm over all heads stays the same."
)


def write_tables(system: System, records: Records, results: Path) -> str:
    """Write the tables of a system as Markdown and JSON; return the Markdown.

    Args:
        system: the system.
        records: finished runs.
        results: folder to write.
    """
    summary = summarize(system, records)
    text = "\n".join(as_lines(system, summary)) + "\n"
    save(results / f"{NAME}-{system.dataset}.md", text)
    save(results / f"{NAME}-{system.dataset}.json", summary)
    return text


def summarize(system: System, records: Records) -> dict[str, Any]:
    """Return the trials of every arm, the chosen settings, the test results by seed, and differences over seeds."""
    runs = list(records.runs.values())
    arms = {arm: _summarize_arm(system, records, arm) for arm in system.arms if any(run["arm"] == arm for run in runs)}
    plain = arms.get(system.baseline, {}).get("test", {})
    for arm, row in arms.items():
        if arm != system.baseline:
            row["against_plain"] = _gaps(row["test"], plain)
    controls = {}
    for run in (run for run in runs if run["stage"] == CONTROL):
        arm, of = run["arm"], run["control_of"]
        if arm not in controls:
            test = _test(system, records, CONTROL, arm)
            controls[arm] = {"of": of, "test": test, "against_plain": _gaps(test, plain)}
            controls[arm]["against_control"] = _gaps(arms[of]["test"], test)
    return {
        "settings": records.settings,
        "versions": records.versions,
        "devices": sorted({run["device"] for run in runs if "device" in run}),
        "epochs": {SCREEN: records.settings.get("screen_epochs"), "later": records.epochs},
        "runs": {stage: sum(run["stage"] == stage for run in runs) for stage in STAGES},
        "seconds_a_run": {
            stage: round(statistics.fmean(times), 1)
            for stage in STAGES
            if (times := [run["seconds"] for run in runs if run["stage"] == stage and "failed" not in run])
        },
        "arms": arms,
        "controls": controls,
    }


def _summarize_arm(system: System, records: Records, arm: str) -> dict[str, Any]:
    stages = {stage: records.of(system.dataset, stage, arm) for stage in (SCREEN, REFINE)}
    losses = {stage: mean_losses(runs) for stage, runs in stages.items()}
    count = len(system.space.ranges(arm))
    points = {run["trial"]: run["changes"][-count:] for runs in stages.values() for run in runs if "changes" in run}
    tried = [
        {"trial": trial, "settings": points.get(trial, [])}
        | {stage: values[trial] for stage, values in losses.items() if trial in values}
        for trial in sorted(losses[SCREEN])
    ]
    final = records.of(system.dataset, FINAL, arm)
    row: dict[str, Any] = {"label": system.arms[arm].label, "tried": tried, "test": _test(system, records, FINAL, arm)}
    row["failed"] = sum("failed" in run for runs in (*stages.values(), final) for run in runs)
    if final:
        trial = final[0]["trial"]
        row["chosen"] = {"trial": trial, "settings": points[trial], "dev_nll": losses[REFINE][trial]}
        row["chosen"]["at_edges"] = system.space.at_edges(arm, points[trial])
    return row


def _test(system: System, records: Records, stage: str, arm: str) -> dict[str, dict[int, float]]:
    """Return metric -> seed -> value on the test set."""
    return {metric: records.test_values(system.dataset, stage, arm, metric) for metric in system.shown}


def _gaps(
    first: Mapping[str, Mapping[int, float]], second: Mapping[str, Mapping[int, float]]
) -> dict[str, dict[str, Any]]:
    """Return metric -> paired difference (first - second) with a 95 % interval by Student's t."""
    return {metric: difference_of(values, second.get(metric, {})) for metric, values in first.items()}


def as_lines(system: System, summary: Mapping[str, Any]) -> list[str]:
    """Format a summary as Markdown lines."""
    arms, controls, settings = summary["arms"], summary["controls"], summary["settings"]
    done = {arm: row for arm, row in arms.items() if row["test"]["nll"]}
    place = f"{', '.join(summary['devices'])}, torch {summary['versions'].get('torch', 'unknown')}"
    seconds = ", ".join(f"{stage} {value} s" for stage, value in summary["seconds_a_run"].items())
    later = f"for {epochs} epochs" if (epochs := summary["epochs"]["later"]) else "for longer"
    lines = [f"# Equal tuning budgets: {system.dataset}", ""]
    lines += [
        f"{sum(summary['runs'].values())} runs on {place}. Mean duration of a run: {seconds}. Every arm tried "
        f"{settings.get('trials')} points of one space for {summary['epochs'][SCREEN]} epochs with one seed, then its "
        f"best {settings.get('refined')} {later} with three seeds; the best of these "
        "by mean NLL on the development set was trained with new seeds.",
        "",
    ]
    head = ["method", "seeds", *(metric.title for metric in system.shown.values())]
    if done:
        lines += ["Test set, mean ± standard deviation over seeds:", "", _means(system, head, done.values()), ""]
        gaps = [(row["label"], row["against_plain"]) for row in done.values() if "against_plain" in row]
        plain = arms[system.baseline]["label"]
        lines += [f"Difference from {plain}, paired by seed, 95 % interval by Student's t:", ""]
        lines += [_differences(system, head, gaps), ""]
    lines += ["Chosen settings, with the mean NLL on the development set:", ""]
    lines += [_setting_line(row) for row in arms.values()]
    lines += ["", f"*Near an end* is within {EDGE:.0%} of the range. Ranges:", "", *_range_lines(system, list(arms))]
    if controls:
        rows = [{"label": name} | control for name, control in controls.items()]
        pairs = [(f"{arms[c['of']]['label']} minus {name}", c["against_control"]) for name, c in controls.items()]
        pairs += [
            (f"{name} minus {arms[system.baseline]['label']}", c["against_plain"]) for name, c in controls.items()
        ]
        lines += ["", "## Controls", "", EXPLANATION.replace("PLAIN", system.baseline), ""]
        lines += [_means(system, ["control", *head[1:]], rows), ""]
        lines += [_differences(system, ["difference", *head[1:]], pairs)]
    elif done and summary["epochs"]["later"]:
        lines += ["", "No controls were trained."]
    return lines


def _means(system: System, head: Sequence[str], rows: Any) -> str:
    body = [
        [
            row["label"],
            str(len(row["test"]["nll"])),
            *(format_mean(row["test"][name], metric.digits, "") for name, metric in system.shown.items()),
        ]
        for row in rows
    ]
    return format_table(head, body)


def _differences(system: System, head: Sequence[str], pairs: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    body = [
        [
            label,
            str(gaps["nll"]["seeds"]),
            *(format_interval(gaps[name], metric.digits) for name, metric in system.shown.items()),
        ]
        for label, gaps in pairs
    ]
    return format_table(head, body)


def _setting_line(row: Run) -> str:
    """Format the chosen settings of an arm."""
    failed = f", {row['failed']} runs failed" if row["failed"] else ""
    count = f"{len(row['tried'])} trials{failed}"
    if "chosen" not in row:
        return f"- {row['label']}: not chosen yet ({count})"
    chosen = row["chosen"]
    values = ", ".join(f"{key} {value:g}" for key, value in as_settings(chosen["settings"]).items())
    edges = f"; near an end: {', '.join(chosen['at_edges'])}" if chosen["at_edges"] else ""
    return f"- {row['label']}: {values} (NLL {chosen['dev_nll']:.4f}; {count}{edges})"


def _range_lines(system: System, arms: Sequence[str]) -> list[str]:
    def text(arm: str) -> str:
        return ", ".join(f"{r.key} {r.low:g} to {r.high:g}" for r in system.space.own[arm])

    common = ", ".join(f"{r.key} {r.low:g} to {r.high:g}" for r in system.common)
    return [f"- all: {common}", *(f"- {system.arms[arm].label}: {text(arm)}" for arm in arms if system.space.own[arm])]
