"""Content of the monitor's live page: charts of each layer, warnings, facts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from repulsive.monitoring.history import History
from repulsive.monitoring.problems import Problem, Thresholds
from repulsive.pages.data.panels import Chart, Panel, Series
from repulsive.pages.monitor_page import MonitorContent

LAYERS = 8  # layers in one chart: the page has eight colours
RELOAD_SECONDS = 5

# quantity -> title of the chart, explanation
_CHARTS = {
    "similarity": ("Similarity of attention logits", "Mean cosine over pairs of heads."),
    "similarity_largest": ("Most similar pair of heads", "Cosine of attention logits; 1: duplicates."),
    "ov_similarity": ("Similarity of OV circuits", "Mean cosine over pairs of heads of what they write."),
    "entropy": ("Entropy of attention", "Mean over heads and queries, in nats."),
    "largest_logit": ("Largest attention logit", "Maximum over heads, queries and keys."),
    "smallest_write": ("Weakest head", "Its write to the residual stream; 1: as large as the layer's typical head."),
    "tokens": ("Similarity of tokens", "Mean cosine of two tokens after the layer; 1: all equal."),
}


def page_content(
    history: History, problems: Sequence[Problem], *, title: str, every: int, thresholds: Thresholds, is_live: bool
) -> MonitorContent:
    """Build the content of the page from the measurements so far.

    Args:
        history: the measurements.
        problems: the problems, oldest first.
        title: heading of the page.
        every: number of steps between two measurements.
        thresholds: when the monitor warns.
        is_live: whether training runs.
    """
    labels = list(dict.fromkeys(layer.label for each in history for layer in each.layers))
    heads = sum(max(len(layer.entropy), len(layer.written)) for layer in history[-1].layers) if len(history) else 0
    facts = [
        ("Last measured step", f"{history[-1].step:,}" if len(history) else "none yet"),
        ("Measured every", "step" if every == 1 else f"{every:,} steps"),
        ("Attention layers", str(len(labels))),
        ("Heads", str(heads)),
        ("Warnings", str(len(problems))),
        ("Warns above", _limits(thresholds)),
    ]
    groups = [labels[start : start + LAYERS] for start in range(0, len(labels), LAYERS)]
    panels = [_panel(history, group, is_only=len(groups) == 1) for group in groups]
    warnings = [f"Step {problem.step:,} · {problem.message}" for problem in reversed(problems)]
    return MonitorContent(title, facts, warnings, panels, RELOAD_SECONDS if is_live else 0)


def _limits(thresholds: Thresholds) -> str:
    return (
        f"cosine of heads {thresholds.duplicate:g}, largest logit {thresholds.logit:g}, cosine of tokens "
        f"{thresholds.tokens:g}; below {thresholds.dead:g} for the weakest head"
    )


def _panel(history: History, labels: Sequence[str], *, is_only: bool) -> Panel:
    title = "Curves of each layer" if is_only else f"Curves of {labels[0]} to {labels[-1]}"
    charts = []
    for quantity, (name, note) in _CHARTS.items():
        lines: dict[str, list[tuple[float, float]]] = {label: [] for label in labels}
        for each in history:
            for layer in each.layers:
                if layer.label in lines:
                    lines[layer.label].append((each.step, layer.values().get(quantity, math.nan)))
        series = [Series(label, points) for label, points in lines.items() if any(y == y for _, y in points)]
        if series:
            charts.append(Chart(name, series, note=note))
    return Panel(title, charts=charts)
