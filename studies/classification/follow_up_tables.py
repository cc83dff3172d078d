"""Tables and figures of the study `follow_up`: numbers of heads, entropy on foreign texts, wider search, maps.

Controls are in the tables of `paper_sizes`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from studies.classification.entropy_tables import entropy_figure, entropy_lines, summarize_entropy
from studies.classification.head_count_tables import (
    ERRORS,
    best_counts,
    count_errors,
    head_lines,
    heads_figure,
)
from studies.classification.lean_runs import ENTROPY, HEADS
from studies.classification.search_space import OWN
from studies.classification.sizes_tables import load_answers
from studies.classification.strengths import STRENGTH, strength_lines, summarize_strengths
from studies.classification.wide_tables import summarize_wide, wide_lines
from studies.output import save, write_content_svgs
from studies.tuning.seed_differences import (
    Run,
    labels_of,
)

from repulsive.pages import Chart, Content, Example, Reading, write_report

RESULT = "follow_up"


def write_follow_up(
    runs: Sequence[Run], versions: Mapping[str, str], out: Path, results: Path, *, with_items: bool
) -> str:
    """Write the tables as Markdown and JSON, and the figures; return the Markdown.

    Args:
        runs: records of the runs.
        versions: versions of packages.
        out: folder with `answers-DATASET.npz` and `maps`.
        results: folder to write.
        with_items: read the stored entropies, for intervals over items and for figures.
    """
    data: dict[str, Any] = {"versions": dict(versions)}
    lines = ["# Follow-up of sentence classification at the paper's sizes", ""]
    charts: list[Chart] = []
    for dataset in dict.fromkeys(run["dataset"] for run in runs if run["stage"] == HEADS):
        own = [run for run in runs if run["dataset"] == dataset]
        points = {metric: count_errors(own, metric) for metric in ERRORS}
        data[f"heads, {dataset}"] = points
        data[f"best heads, {dataset}"] = best_counts(points["accuracy"], count_errors(own, "accuracy", "dev"))
        lines += [f"## Number of heads: {dataset}", "", *head_lines(own, points), ""]
        figures = [heads_figure(dataset, own, metric, errors) for metric, errors in points.items()]
        lines += _links(figures if with_items else [])
        charts += figures
    for dataset in dict.fromkeys(run["dataset"] for run in runs if run["stage"] == ENTROPY and "foreign" in run):
        own = [run for run in runs if run["dataset"] == dataset and run["stage"] == ENTROPY and "foreign" in run]
        arrays = load_answers(out / f"answers-{dataset}.npz") if with_items else {}
        data[f"entropy, {dataset}"] = summary = summarize_entropy(own, arrays)
        lines += [f"## Entropy on foreign texts: {dataset}", "", *entropy_lines(own, summary), ""]
        figures = [entropy_figure(own, arrays, kind) for kind in ("own", "foreign") if arrays]
        lines += _links(figures)
        charts += figures
    wide = [run for run in runs if run["stage"].startswith("wide")]
    for dataset in dict.fromkeys(run["dataset"] for run in wide):
        own = [run for run in runs if run["dataset"] == dataset]
        data[f"wide, {dataset}"] = rows = summarize_wide(own)
        lines += [f"## Wider search: {dataset}", "", *wide_lines(rows), ""]
    for dataset in dict.fromkeys(run["dataset"] for run in runs if run["stage"] == STRENGTH):
        own = [run for run in runs if run["dataset"] == dataset]
        data[f"strengths, {dataset}"] = rows = summarize_strengths(own)
        lines += [f"## Strengths at plain attention's settings: {dataset}", "", *strength_lines(rows), ""]
    examples = load_maps(out / "maps", labels_of(runs))
    if examples:
        title = "Attention of all heads on reviews of the test set"
        lead = "One model of each method, all trained with the same seed (Figure 1 and appendix D of the paper)."
        write_report(results / RESULT / "maps.html", Content(title, lead, examples=examples))
        picture = f"; [the first one as a picture]({RESULT}/attention-1.svg)" if with_items else ""
        page = f"[Attention of all heads on {len(examples)} reviews]({RESULT}/maps.html)"
        lines += ["## Attention maps", "", f"{page}{picture}.", ""]
    if with_items and (charts or examples):
        (results / RESULT).mkdir(parents=True, exist_ok=True)
        write_content_svgs(Content("", charts=charts, examples=examples[:1]), results / RESULT)
    text = "\n".join(lines)
    save(results / f"{RESULT}.md", text)
    save(results / f"{RESULT}.json", data)
    return text


def _links(charts: Sequence[Chart]) -> list[str]:
    """Link figures in Markdown; empty without figures."""
    links = [f"[{chart.name[:1].lower()}{chart.name[1:]}]({RESULT}/{chart.file}.svg)" for chart in charts]
    return [f"Figures: {', '.join(links)}.", ""] if links else []


def load_maps(folder: Path, labels: Mapping[str, str]) -> list[Example]:
    """Combine the stored attention of all methods into examples; empty without files.

    Args:
        folder: folder of the files.
        labels: arm -> its label.
    """
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for arm in OWN:
        for path in sorted(folder.glob(f"*-{arm}-*.json"))[:1]:
            by_arm[arm] = json.loads(path.read_text())
    examples = []
    for same in zip(*by_arm.values(), strict=True):
        readings = [
            Reading(labels[arm], each["predicted"], each["probability"], each["attention"])
            for arm, each in zip(by_arm, same, strict=True)
        ]
        examples.append(Example(same[0]["tokens"], same[0]["label"], readings))
    return examples
