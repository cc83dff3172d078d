"""Write the page of the study from its stored measurements."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from studies.kernel_free.measure import PAIRS
from studies.kernel_free.systems import KERNEL_FREE, NUDGED, PLAIN, PUBLISHED

from repulsive.metrics.student import half_width
from repulsive.safety.markdown import format_table

LEAD = """\
Three rules in every system: plain training, the published rule, and the same without its kernel (kernel-free). All
runs of a seed have the same initial weights, batches and dropout. *Published, nudged* has the published rule and
initial weights that differ by one part in a thousand: its distance shows how far two trainings with one rule drift
apart. All numbers are those of the last step; heads are those on which the rule acts. a ± b is the mean over seeds
with half of the 95 % interval by Student's t.
"""
LOSSES = """\
Negative log-likelihood on the test set, in nats per token or text. Differences have 95 % intervals that cover new seeds
and new test items; they are paired by both.
"""
HEADS = "Norm of a head and mean cosine between two heads, of q, k and v apart, means over groups of heads."
DISTANCES = """\
Distance of the heads' weights from those of the published rule, in percent of their norm. *Excess* is the distance of
kernel-free minus that of the nudged run, paired by seed; *share* is the distance of kernel-free in percent of that of
plain. *Force* is the relative difference between the repulsion of the two
rules, at the final weights of the published rule and at those of plain training. *M κ* is the number of heads times the
kernel between two heads, 5th to 95th percentile at the final weights of the published rule; it is 1 if all distances
are equal.
"""
PAPER = "translation, the paper's settings"


def write_page(about: Mapping[str, Any], systems: Mapping[str, Mapping[str, Any]], paper: Path) -> str:
    """Write the page.

    Args:
        about: command, versions and date.
        systems: what `collect` returned.
        paper: `paper_settings.json` of the translation study; its row is added if the file exists.
    """
    parts = [
        "# SVGD with and without its kernel, in every system",
        f"`{about['command']}` (one CPU core, torch {about['torch']}, {about['date']}).",
        LEAD.strip(),
        "## Loss",
        LOSSES.strip(),
        loss_table(systems, paper),
        _paper_note(paper),
        "## Heads",
        HEADS,
        head_table(systems),
        "## Distances",
        DISTANCES.strip(),
        distance_table(systems),
        "## Sizes",
        "\n".join(f"- {system['title']}: {_size(system)}" for system in systems.values()),
    ]
    return "\n\n".join(parts) + "\n"


def loss_table(systems: Mapping[str, Mapping[str, Any]], paper: Path) -> str:
    """Format test losses and their differences, a row for each system."""
    rows = []
    for system in systems.values():
        means = [_mean(system, arm, "loss", ".4f") for arm in (PLAIN, PUBLISHED, KERNEL_FREE)]
        compared = {(c["first"], c["second"]): _difference(c) for c in system["comparisons"]}
        rows.append([system["title"], str(len(_seeds(system))), *means, *(compared.get(pair, "") for pair in PAIRS)])
    differences = [f"{first} - {second.removeprefix(f'{PUBLISHED}, ')}" for first, second in PAIRS]
    return format_table(["system", "seeds", PLAIN, PUBLISHED, KERNEL_FREE, *differences], rows + _paper_rows(paper))


def head_table(systems: Mapping[str, Mapping[str, Any]]) -> str:
    """Format norms and cosines, a row for each system."""
    rows = []
    for system in systems.values():
        cells = [
            _with_interval(_values(system, arm, key), form)
            for key, form in (("norm", ".2f"), ("cosine", ".3f"))
            for arm in (PLAIN, PUBLISHED, KERNEL_FREE)
        ]
        rows.append([system["title"], f"{system['heads']} x {system['numbers']:,}", *cells])
    names = [f"{key}, {arm}" for key in ("norm", "cosine") for arm in (PLAIN, PUBLISHED, KERNEL_FREE)]
    return format_table(["system", "heads x numbers", *names], rows)


def distance_table(systems: Mapping[str, Mapping[str, Any]]) -> str:
    """Format distances between weights, a row for each system."""
    rows = []
    for system in systems.values():
        distances = [_percent(_values(system, arm, "distance")) for arm in (KERNEL_FREE, NUDGED, PLAIN)]
        excess = _percent([first - second for first, second in paired_distances(system, NUDGED)], "+")
        share = _percent([first / second for first, second in paired_distances(system, PLAIN)])
        forces = [_percent(_values(system, arm, "force")) for arm in (PUBLISHED, PLAIN)]
        kernels = [run["kernel"] for run in system["runs"] if run["arm"] == PUBLISHED]
        kernel = " to ".join(f"{statistics.fmean(ends):.2f}" for ends in zip(*kernels, strict=True))
        rows.append([system["title"], *distances[:2], excess, distances[2], share, *forces, kernel])
    names = [KERNEL_FREE, NUDGED, "excess", PLAIN, "share", "force", "force at plain"]
    return format_table(["system", *(f"{name} (%)" for name in names), "M κ"], rows)


def paired_distances(system: Mapping[str, Any], arm: str) -> list[tuple[float, float]]:
    """Distances of kernel-free and of another arm from the published rule, for each seed that has both."""
    distances = {(run["arm"], run["seed"]): run["distance"] for run in system["runs"]}
    both = [seed for seed in _seeds(system) if {(KERNEL_FREE, seed), (arm, seed)} <= distances.keys()]
    return [(distances[KERNEL_FREE, seed], distances[arm, seed]) for seed in both]


def _percent(values: Sequence[float], sign: str = "") -> str:
    return _with_interval([100 * x for x in values], f"{sign}.2f")


def _seeds(system: Mapping[str, Any]) -> list[int]:
    return sorted({run["seed"] for run in system["runs"]})


def _values(system: Mapping[str, Any], arm: str, key: str) -> list[float]:
    return [run[key] for run in system["runs"] if run["arm"] == arm]


def _mean(system: Mapping[str, Any], arm: str, key: str, form: str) -> str:
    values = _values(system, arm, key)
    return f"{statistics.fmean(values):{form}}" if values else ""


def _with_interval(values: Sequence[float], form: str) -> str:
    if not values:
        return ""
    mean = f"{statistics.fmean(values):{form}}"
    return f"{mean} ± {half_width(values):{form.removeprefix('+')}}" if len(values) > 1 else mean


def _difference(comparison: Mapping[str, Any]) -> str:
    ends = ", ".join(f"{comparison[end]:+.4f}" for end in ("low", "high"))
    note = " (one seed)" if comparison["over"] == "items" else ""
    return f"{comparison['difference']:+.4f} [{ends}]{note}"


def _size(system: Mapping[str, Any]) -> str:
    groups = f"{system['groups']} group{'' if system['groups'] == 1 else 's'}"
    heads = f"{groups} of {system['heads']} heads with {system['numbers']:,} numbers each"
    return f"{system['about']}; {system['steps']:,} steps; {heads}; {system['seconds']} s for all runs."


# -- translation at the paper's settings, from another study ----------------------------------------------------------


def _paper_rows(path: Path) -> list[list[str]]:
    """Format the longest training of the translation study as a row; none if a rule has not been trained."""
    section = _paper_section(path)
    if section is None:
        return []
    part = section["parts"]["test"]
    rows = {row["folder"]: row for row in part["rows"]}
    means = [f"{rows[arm]['cells']['nll']['mean']:.4f}" for arm in (PLAIN, PUBLISHED, KERNEL_FREE)]
    compared = {(arm, PLAIN): rows[arm]["against"]["nll"] for arm in (PUBLISHED, KERNEL_FREE)}
    for other in part["other comparisons"]:
        if other["metric"] == "nll":
            compared[tuple(other["rows"].split(" minus "))] = other["comparison"]
    differences = [_difference(compared[pair]) if pair in compared else "" for pair in PAIRS]
    return [[PAPER, str(len(rows[PUBLISHED]["seeds"])), *means, *differences]]


def _paper_section(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    for section in json.loads(path.read_text())["sections"]:  # the longest training first
        if {PLAIN, PUBLISHED, KERNEL_FREE} <= {row["folder"] for row in section["parts"]["test"]["rows"]}:
            found: dict[str, Any] = section
            return found
    return None


def _paper_note(path: Path) -> str:
    section = _paper_section(path)
    if section is None:
        return (
            "Translation at the paper's settings (6+6 layers, width 512) is another study, `studies.translation."
            "paper_settings`; its row is added here when `results/translation/paper_settings.json` exists."
        )
    return (
        f"Translation at the paper's settings: after {section['updates']:,} updates, on {section['device']}; norms and "
        "cosines are in [paper_settings.md](../translation/paper_settings.md). Its weights were not compared."
    )
