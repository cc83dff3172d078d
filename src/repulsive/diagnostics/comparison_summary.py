"""Summarise a comparison of two models: the verdict in one sentence, plain text and JSON."""

from __future__ import annotations

import math
import statistics
from typing import Any

from repulsive.diagnostics.inspection import Inspection
from repulsive.diagnostics.model_comparison import MIN_GROUPS, ModelComparison
from repulsive.diagnostics.summary import as_json, format_rows
from repulsive.diagnostics.untrained_baseline import MARGIN
from repulsive.diagnostics.verdict import name_layers, redundant_heads

Row = tuple[str, ...]


def comparison_verdict(comparison: ModelComparison) -> str:
    """Write the most important result of a comparison as one sentence.

    Args:
        comparison: result of `compare_models`.
    """
    parts = [part for part in (_on_heads(comparison), _on_similarity(comparison)) if part]
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


def layer_rows(comparison: ModelComparison) -> tuple[Row, list[Row]]:
    """Tabulate each layer before and after: column headers, and one row per layer.

    Args:
        comparison: result of `compare_models`.
    """
    sides = (comparison.before, comparison.after)
    logits = [{each.similarity.name: each.similarity for each in side.circuits.logits} for side in sides]
    redundant = [redundant_heads(side) for side in sides]
    rows: list[Row] = []
    for row, layers in enumerate(zip(comparison.before.layers, comparison.after.layers, strict=True)):
        names = [layer[0] for layer in layers]
        own = [each.get(name) for each, name in zip(logits, names, strict=True)]
        rows.append(
            (
                comparison.before.label(names[0]),
                format_change(*(str(layer[3]) for layer in layers)),
                format_change(*("n/a" if each is None else _number(each.mean) for each in own)),
                format_change(*("n/a" if each is None else _number(each.largest) for each in own)),
                format_change(*(str(sum(at == row for at, _ in side)) for side in redundant)),
            )
        )
    marked = "unimportant heads" if comparison.before.ablation is None else "redundant heads"
    return ("layer", "heads", "mean cosine of logits", "largest cosine", marked), rows


def comparison_text(comparison: ModelComparison) -> str:
    """Format what `repulsive inspect --compare` prints: the verdict, and a table of layers before and after."""
    titles, rows = layer_rows(comparison)
    blocks = [comparison_verdict(comparison), format_rows("before → after, layer by layer", titles, rows)]
    notes = [*comparison.notes, *comparison.before.notes, *comparison.after.notes]
    return "\n\n".join([*blocks, *(f"note: {note}" for note in dict.fromkeys(notes))])


def comparison_json(comparison: ModelComparison) -> dict[str, Any]:
    """Convert a comparison to a dictionary for `json.dumps`: both inspections and how they differ."""
    difference = comparison.difference
    return {
        "verdict": comparison_verdict(comparison),
        "before": as_json(comparison.before),
        "after": as_json(comparison.after),
        "heads": [[list(pair) for pair in layer] for layer in comparison.columns],
        "removed": [list(head) for head in comparison.removed],
        "added": [list(head) for head in comparison.added],
        "similarity": {
            "before": list(difference.before),
            "after": list(difference.after),
            "difference": difference.mean if difference.before else None,
            "interval": None if difference.interval is None else list(difference.interval),
        },
        "notes": list(comparison.notes),
    }


def _on_heads(comparison: ModelComparison) -> str:
    parts = []
    for heads, side, word in (
        (comparison.removed, comparison.before, "removed"),
        (comparison.added, comparison.after, "added"),
    ):
        if heads:
            where = name_layers(_labels(side, sorted({row for row, _ in heads})))
            total = sum(count for *_, count in side.layers)
            parts.append(f"{len(heads)} of {total} heads {'is' if len(heads) == 1 else 'are'} {word} ({where})")
    return "; ".join(parts)


def _on_similarity(comparison: ModelComparison) -> str:
    difference, interval = comparison.difference, comparison.difference.interval
    if not comparison.before.items:
        return "only weights were compared; add inputs to compare how alike heads attend"
    if interval is None:
        return (
            f"cannot say whether heads attend more or less alike: that needs at least {MIN_GROUPS} inputs, "
            f"found {len(difference.before)}"
        )
    low, high = interval
    digits = 3 if abs(difference.mean) < 0.1 else 2
    values = format_change(*(_number(statistics.fmean(side), digits) for side in (difference.before, difference.after)))
    change, start, end = (_number(value, digits, signed=True) for value in (difference.mean, low, high))
    measured = (
        f"mean cosine of attention logits {values}, difference {change}, 95 % CI {start} to {end} over "
        f"{len(difference.before)} groups of inputs"
    )
    if low > 0 or high < 0:
        slightly = "slightly " if abs(difference.mean) < MARGIN else ""
        return f"heads attend {slightly}{'more' if low > 0 else 'less'} alike than before ({measured})"
    return f"no significant difference in how alike heads attend ({measured})"


def _labels(inspection: Inspection, rows: list[int]) -> list[str]:
    return [inspection.label(inspection.layers[row][0]) for row in rows]


def format_change(before: str, after: str) -> str:
    """Format two values as "before → after"; equal values as one."""
    return before if before == after else f"{before} → {after}"


def _number(value: float, digits: int = 3, *, signed: bool = False) -> str:
    """Format with fixed decimals and a typographic minus sign; nan becomes "n/a"."""
    if math.isnan(value):
        return "n/a"
    return f"{value:{'+' if signed else ''}.{digits}f}".replace("-", "−")
