"""Figure of the study `paper_sizes`: differences in accuracy from plain attention and from controls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from studies.altered_forces import ATTRACTION, WRONG_PARTNER
from studies.classification.search_space import BASELINE

from repulsive.lab.paper.classifier_claims import DATA
from repulsive.lab.paper.forest_plot import Row, dot, draw_forest

EDGES = (-2.0, 3.0)
METRIC, SCALE = "accuracy", 100.0
LEGEND = (
    f'{dot(146, 20)}<text x="156" y="24">minus plain attention, tuned equally</text>',
    f'<g class="control">{dot(396, 20, is_control=True)}</g><text x="406" y="24">minus a control: see the row</text>',
)


def draw_figure(data: Mapping[str, Any]) -> str:
    """Draw the accuracy differences of all methods, each followed by those from its controls.

    Args:
        data: dataset -> summary, as in paper_sizes.json.
    """
    rows = [row for dataset, summary in data.items() for row in _rows(dataset, summary)]
    title = "Accuracy of classifiers at the paper's sizes: methods minus plain attention and minus controls"
    return draw_forest(title, rows, EDGES, "difference in accuracy, in points, 95 % intervals", LEGEND)


def _rows(dataset: str, summary: Mapping[str, Any]) -> Iterator[Row]:
    arms = summary["arms"]
    seeds = sorted({len(row["seeds"]) for row in arms.values() if row["seeds"]})
    yield Row(f"{DATA[dataset][0]}, {' or '.join(map(str, seeds))} seeds")
    for arm, row in arms.items():
        if METRIC not in row.get("against_plain", {}):
            continue
        yield Row(row["label"].replace("cosine: smoothing", "cosine kernel"), _interval(row["against_plain"]))
        for name, control in summary["controls"].items():
            if METRIC in control["of"].get(arm, {}):
                yield Row(f"… minus {_describe(name)}", _interval(control["of"][arm]), is_control=True)


def _interval(differences: Mapping[str, Any]) -> tuple[float, float, float]:
    values = differences[METRIC]
    return SCALE * values["difference"], SCALE * values["low"], SCALE * values["high"]


def _describe(control: str) -> str:
    """Describe a control in a few words."""
    if control.startswith(f"{BASELINE}@"):
        return "plain, same settings"
    if control.endswith(f"@{BASELINE}"):
        return "itself, plain's settings"
    if control == f"{BASELINE}, longer":
        return "plain, more epochs"
    if control.endswith(f", {ATTRACTION}"):
        return "itself, attracting"
    if control.endswith(f", {WRONG_PARTNER}"):
        return "itself, wrong partner"
    return f"itself without {control.rpartition('no ')[2]}"
