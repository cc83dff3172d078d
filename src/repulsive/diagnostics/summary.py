"""Format an inspection as plain-text tables and as JSON."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from repulsive.diagnostics.inspection import Inspection
from repulsive.diagnostics.permuted_heads import Permuted
from repulsive.diagnostics.similarity import Diversity
from repulsive.diagnostics.similarity_table import TITLES, format_interval, format_null
from repulsive.diagnostics.untrained_baseline import SPACES as MEASURES
from repulsive.diagnostics.untrained_baseline import Compared, Space
from repulsive.diagnostics.verdict import redundant_heads, verdict
from repulsive.heads import describe

SPACES = ("weights", "attention", "outputs")
_NAMES = {"logits": "attention logits", "ov": "OV circuits"}


def as_text(inspection: Inspection, count: int = 5) -> str:
    """Format what `repulsive inspect` prints: the verdict, then tables.

    Args:
        inspection: the measurements.
        count: number of pairs and of heads to list.
    """
    blocks = [verdict(inspection), describe(inspection.groups)]
    for measure in MEASURES:
        entries = getattr(inspection.circuits, measure)
        if entries:
            blocks.append(_similarity(measure, entries))
    for space in SPACES:
        if space in inspection.diversity:
            blocks.append(_diversity(space, inspection.diversity[space]))
    for space in SPACES:
        pairs = inspection.closest(space, count)
        if pairs:
            listed = [(p.name, f"{p.first} and {p.second}", f"{p.cosine:+.3f}") for p in pairs]
            blocks.append(format_rows(f"most similar pairs of heads in {space}", ("layer", "heads", "cosine"), listed))
    if inspection.importance is not None:
        title = "least important heads by first-order importance (l2 norm over the heads of a layer: 1)"
        blocks.append(_least_important(inspection, title, inspection.importance, "importance", count))
    if inspection.ablation is not None:
        title = f"least important heads by ablation: {inspection.metric}"
        blocks.append(_least_important(inspection, title, inspection.ablation.change, "change", count))
    blocks += [f"note: {note}" for note in inspection.notes]
    return "\n\n".join(blocks)


def as_json(inspection: Inspection) -> dict[str, Any]:
    """Convert an inspection to a dictionary for `json.dumps`; nan and infinity become None."""
    return {
        "verdict": verdict(inspection),
        "items": inspection.items,
        "layers": [
            {"name": name, "layer": layer, "where": where, "heads": heads}
            for name, layer, where, heads in inspection.layers
        ],
        "diversity": {
            space: [
                {
                    "name": d.name,
                    "mean_cosine": _number(d.mean_cosine),
                    "mean_distance": _number(d.mean_distance),
                    "effective_heads": _number(d.effective_heads),
                    "cosine": _nested(d.cosine),
                }
                | ({"mean_cosine_of_tokens": _number(d.tokens)} if space == "outputs" else {})
                for d in entries
            ]
            for space, entries in inspection.diversity.items()
        },
        "similarity": {space: [_compared(each) for each in getattr(inspection.circuits, space)] for space in MEASURES},
        "importance": None if inspection.importance is None else _nested(inspection.importance),
        "ablation": None
        if inspection.ablation is None
        else {
            "metric": inspection.metric,
            "baseline": _number(inspection.ablation.baseline),
            "change": _nested(inspection.ablation.change),
        },
        "pruning": None
        if inspection.pruned is None
        else {
            "removed": list(inspection.pruned.removed),
            "change": [_number(value) for value in inspection.pruned.metric],
            "order": [list(head) for head in inspection.pruned.order],
        },
        "redundant": [list(head) for head in redundant_heads(inspection)],
        "kinds": None
        if inspection.kinds is None
        else {
            "labels": [[*head, kind] for head, kind in inspection.kinds.labels().items()],
            "scores": {kind: _nested(scores) for kind, scores in inspection.kinds.scores.items()},
            "thresholds": dict(inspection.kinds.thresholds),
        },
        "notes": list(inspection.notes),
    }


def count_verdicts(entries: Sequence[Compared], *, permuted: bool = False) -> str:
    """Count the layers with each verdict on their mean cosine, the most frequent verdict first.

    Args:
        entries: the layers.
        permuted: count the verdicts against permuted heads instead of untrained twins.

    Example:
        >>> count_verdicts([])
        'no layers'
    """
    counted = Counter(entry.permuted_verdict if permuted else entry.verdict for entry in entries).most_common()
    return ", ".join(f"{verdict}: {count} of {len(entries)} layers" for verdict, count in counted) or "no layers"


def _similarity(space: Space, entries: Sequence[Compared]) -> str:
    rows = []
    for entry in entries:
        own, pair = entry.similarity, entry.similarity.pair
        heads = "n/a" if pair is None else f"{pair.first} and {pair.second}"
        rows.append(
            (
                own.name,
                _signed(own.mean),
                format_interval(own.interval),
                format_null(entry.mean),
                entry.verdict,
                format_null(entry.permuted),
                entry.permuted_verdict,
                heads,
                _signed(own.largest),
                format_null(entry.largest),
            )
        )
    score = "CKA" if space == "cka" else "cosine"
    own_titles = ("layer", f"mean {score}", "95 % CI", "untrained", "verdict", "permuted heads", "verdict")
    counted = f"{count_verdicts(entries)}; permuted heads: {count_verdicts(entries, permuted=True)}"
    title = f"similarity of heads in {_NAMES.get(space, TITLES[space])} ({counted})"
    return format_rows(title, (*own_titles, "most similar pair", score, "untrained"), rows)


def _compared(entry: Compared) -> dict[str, Any]:
    own, pair = entry.similarity, entry.similarity.pair
    return {
        "name": own.name,
        "mean_cosine": _number(own.mean),
        "interval": None if own.interval is None else list(own.interval),
        "largest_cosine": _number(own.largest),
        "largest_pair": None if pair is None else [pair.first, pair.second],
        "largest_interval": None if own.pair_interval is None else list(own.pair_interval),
        "verdict": entry.verdict,
        "largest_verdict": entry.pair_verdict,
        "untrained": {
            "mean_cosine": [_number(value) for value in entry.mean.values],
            "largest_cosine": [_number(value) for value in entry.largest.values],
        },
        "permuted": None if own.permuted is None else _permuted(entry, own.permuted),
        "tokens": own.tokens,
        "cosine": _nested(own.cosine),
    }


def _permuted(entry: Compared, permuted: Permuted) -> dict[str, Any]:
    return {
        "layers": permuted.layers,
        "draws": len(permuted.means),
        "own_mean_cosine": _number(permuted.mean),
        "mean_cosine": _number(entry.permuted.mean),
        "deviation": _number(entry.permuted.deviation),
        "verdict": entry.permuted_verdict,
        "own_largest_cosine": _number(permuted.largest),
        "largest_cosine": _number(entry.permuted_largest.mean),
        "largest_deviation": _number(entry.permuted_largest.deviation),
        "largest_verdict": entry.permuted_pair_verdict,
    }


def _diversity(space: str, entries: Sequence[Diversity]) -> str:
    tokens = space == "outputs"
    rows = [
        (d.name, str(d.num_heads), _signed(d.mean_cosine), format_distance(d))
        + ((_signed(d.tokens),) if tokens else ())
        + (f"{d.effective_heads:.2f}",)
        for d in entries
    ]
    # Effective heads come last: the count falls when heads repel beyond orthogonal, so it does not rank models.
    titles = ("layer", "heads", "mean cosine", "mean distance", *(("cosine of tokens",) if tokens else ()))
    return format_rows(f"similarity of heads in {space}", (*titles, "effective heads"), rows)


def _least_important(inspection: Inspection, title: str, scores: Tensor, measure: str, count: int) -> str:
    rows = [(name, str(head), f"{score:.4g}") for name, head, score in inspection.least(scores, count)]
    return format_rows(title, ("layer", "head", measure), rows)


def format_rows(title: str, titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Format a table as plain text: a title, column headers and rows of aligned columns."""
    lines = [titles, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([title, *table])


def _signed(value: float) -> str:
    return "n/a" if math.isnan(value) else f"{value:+.3f}"


def format_effective_heads(entries: Sequence[Diversity]) -> str:
    """Format the mean number of effective heads, apart for each number of heads: groups may have different numbers."""
    counts = sorted({each.num_heads for each in entries}, reverse=True)
    means = {n: statistics.fmean(each.effective_heads for each in entries if each.num_heads == n) for n in counts}
    return ", ".join(f"{mean:.1f} of {n}" for n, mean in means.items()) + ", mean over layers"


def format_distance(diversity: Diversity) -> str:
    """Format the mean distance between two heads; "n/a" for a single head."""
    return "n/a" if math.isnan(diversity.mean_distance) else f"{diversity.mean_distance:.4g}"


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _nested(values: Tensor) -> list[list[float | None]]:
    return [[_number(x) for x in row] for row in values.tolist()]
