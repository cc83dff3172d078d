"""Scores and attention at the end of training of the models that a table about heads describes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from studies.translation.finished_rows import FinishedRow

from repulsive.safety.markdown import format_table

SCORES = {"bleu": ("BLEU", 1), "nll": ("NLL", 3), "accuracy": ("accuracy", 3)}  # metric -> title and decimals
ATTENTION = {
    "norm": ("norm of a head", 1),
    "largest_logit": ("largest logit", 1),
    "entropy/cross": ("entropy of cross-attention", 2),
    "token_cosine": ("cosine of tokens", 3),
}
LEAD = """\
The same models with all heads, means over seeds: scores on the test set; at the last evaluation in training, before
weights are averaged, norm of a head, and attention on 16 sentence pairs of the development set. Entropy is in nats; the
cosine is that between the states that the encoder gives to two tokens of a sentence.
"""
Metrics = dict[str, dict[int, float]]  # metric -> seed -> value


def final_metrics(each: FinishedRow) -> Metrics:
    """Collect the scores of a row's runs on the test set, and the last measurements of their attention."""
    metrics: Metrics = {}
    for seed, run in each.runs.items():
        scores = run.metrics("test")
        values = {name: scores[name] for name in SCORES}
        values |= {name: points[-1][1] for name in ATTENTION if (points := run.curve("dev", name))}
        for name, value in values.items():
            metrics.setdefault(name, {})[seed] = value
    return metrics


def format_metrics(rows: Mapping[tuple[str, ...], Metrics], head: tuple[str, ...]) -> str:
    """Format the means over seeds as a table.

    Args:
        rows: first cells of a row -> its metrics.
        head: titles of these cells.
    """
    columns = SCORES | ATTENTION
    shown = [name for name in columns if all(name in metrics for metrics in rows.values())]
    body = [
        [*cells, *(f"{statistics.fmean(metrics[name].values()):.{columns[name][1]}f}" for name in shown)]
        for cells, metrics in rows.items()
    ]
    return format_table([*head, *(columns[name][0] for name in shown)], body)
