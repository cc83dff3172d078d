"""An inspection in words: plain-text tables for a terminal, and the same numbers as JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from repulsive.diagnostics.chance import Compared, Null
from repulsive.diagnostics.diversity import Diversity
from repulsive.diagnostics.inspection import Inspection
from repulsive.heads import describe

SPACES = ("weights", "attention", "outputs")


def as_text(found: Inspection, count: int = 5) -> str:
    """What `repulsive inspect` prints.

    Args:
        found: the inspection.
        count: pairs and heads listed.
    """
    blocks = [describe(found.groups)]
    for circuit, entries in (("attention logits", found.circuits.logits), ("OV circuits", found.circuits.ov)):
        if entries:
            blocks.append(_circuits(circuit, entries))
    for space in SPACES:
        if space in found.diversity:
            blocks.append(_diversity(space, found.diversity[space]))
    for space in SPACES:
        pairs = found.closest(space, count)
        if pairs:
            listed = [(p.name, f"{p.first} and {p.second}", f"{p.cosine:+.3f}") for p in pairs]
            blocks.append(_titled(f"most similar pairs in {space}", ("layer", "heads", "cosine"), listed))
    if found.importance is not None:
        title = "most redundant heads by first-order importance (1 is all of a layer's)"
        blocks.append(_heads(found, title, found.importance, "importance", count))
    if found.ablation is not None:
        title = f"most redundant heads by exact ablation: {found.metric}"
        blocks.append(_heads(found, title, found.ablation.change, "change", count))
    blocks += [f"note: {note}" for note in found.notes]
    return "\n\n".join(blocks)


def as_json(found: Inspection) -> dict[str, Any]:
    """The numbers of an inspection, ready for `json.dumps`; nan and infinity are None."""
    return {
        "items": found.items,
        "layers": [
            {"name": name, "layer": layer, "where": where, "heads": heads} for name, layer, where, heads in found.layers
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
            for space, entries in found.diversity.items()
        },
        "similarity": {
            "logits": [_compared(each) for each in found.circuits.logits],
            "ov": [_compared(each) for each in found.circuits.ov],
        },
        "importance": None if found.importance is None else _nested(found.importance),
        "ablation": None
        if found.ablation is None
        else {
            "metric": found.metric,
            "baseline": _number(found.ablation.baseline),
            "change": _nested(found.ablation.change),
        },
        "pruning": None
        if found.pruned is None
        else {
            "removed": list(found.pruned.removed),
            "change": [_number(value) for value in found.pruned.metric],
            "order": [list(head) for head in found.pruned.order],
        },
        "notes": list(found.notes),
    }


def count_verdicts(entries: Sequence[Compared]) -> str:
    """How many layers have which verdict on their mean cosine, the most frequent first.

    Example:
        >>> count_verdicts([])
        'no layers'
    """
    counted = Counter(entry.verdict for entry in entries).most_common()
    return ", ".join(f"{verdict}: {count} of {len(entries)} layers" for verdict, count in counted) or "no layers"


def _circuits(circuit: str, entries: Sequence[Compared]) -> str:
    rows = []
    for entry in entries:
        own, pair = entry.similarity, entry.similarity.pair
        heads = "n/a" if pair is None else f"{pair.first} and {pair.second}"
        rows.append(
            (
                own.name,
                _signed(own.mean),
                _plus_minus(entry.mean),
                entry.verdict,
                heads,
                _signed(own.largest),
                _plus_minus(entry.largest),
            )
        )
    titles = ("layer", "mean cosine", "untrained", "verdict", "most similar pair", "cosine", "untrained")
    return _titled(f"similarity of {circuit} ({count_verdicts(entries)})", titles, rows)


def _plus_minus(null: Null) -> str:
    if math.isnan(null.deviation):
        return _signed(null.mean)
    return f"{null.mean:+.3f} +- {null.deviation:.3f}"


def _compared(entry: Compared) -> dict[str, Any]:
    own, pair = entry.similarity, entry.similarity.pair
    return {
        "name": own.name,
        "mean_cosine": _number(own.mean),
        "largest_cosine": _number(own.largest),
        "largest_pair": None if pair is None else [pair.first, pair.second],
        "verdict": entry.verdict,
        "largest_verdict": entry.pair_verdict,
        "untrained": {
            "mean_cosine": [_number(value) for value in entry.mean.values],
            "largest_cosine": [_number(value) for value in entry.largest.values],
        },
        "tokens": own.tokens,
        "cosine": _nested(own.cosine),
    }


def _diversity(space: str, entries: Sequence[Diversity]) -> str:
    tokens = space == "outputs"
    rows = [
        (d.name, str(d.num_heads), f"{d.effective_heads:.2f}", _signed(d.mean_cosine), apart(d))
        + ((_signed(d.tokens),) if tokens else ())
        for d in entries
    ]
    titles = ("layer", "heads", "effective heads", "mean cosine", "mean distance")
    return _titled(f"diversity of {space}", titles + (("cosine of tokens",) if tokens else ()), rows)


def _heads(found: Inspection, title: str, scores: Tensor, what: str, count: int) -> str:
    rows = [(name, str(head), f"{score:.4g}") for name, head, score in found.least(scores, count)]
    return _titled(title, ("layer", "head", what), rows)


def _titled(title: str, titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [titles, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([title, *table])


def _signed(value: float) -> str:
    return "n/a" if math.isnan(value) else f"{value:+.3f}"


def apart(found: Diversity) -> str:
    """The mean distance of two heads; one alone has none."""
    return "n/a" if math.isnan(found.mean_distance) else f"{found.mean_distance:.4g}"


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _nested(values: Tensor) -> list[list[float | None]]:
    return [[_number(x) for x in row] for row in values.tolist()]
