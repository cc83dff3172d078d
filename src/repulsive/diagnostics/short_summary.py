"""The summary that `repulsive inspect` prints: the verdict, and at most ten lines of numbers."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence

from repulsive.diagnostics.inspection import Inspection
from repulsive.diagnostics.summary import format_effective_heads
from repulsive.diagnostics.untrained_baseline import Compared
from repulsive.diagnostics.verdict import redundant_heads, verdict
from repulsive.heads.describe import count_of
from repulsive.terminal.table import Table, signed

_LISTED = 6  # redundant heads that are named


def short_summary(inspection: Inspection) -> list[Table | str]:
    """Summarise an inspection in a sentence and a table of at most ten rows.

    Args:
        inspection: result of `inspect_heads`.

    Returns:
        The verdict, the table, and the notes. Each mean has the most frequent verdict with its number of layers, and
        stands beside the mean of untrained models of the same architecture.
    """
    rows = [["heads", _sizes(inspection), ""]]
    rows += _mean("mean cosine, attention logits", inspection.circuits.logits) + _largest(inspection)
    for name, entries in (
        ("mean cosine, OV circuits", inspection.circuits.ov),
        ("mean cosine, attention maps", inspection.circuits.attention),
        ("mean cosine, outputs", inspection.circuits.outputs),
        ("mean CKA, outputs", inspection.circuits.cka),
    ):
        rows += _mean(name, entries)
    weights = [each for each in inspection.diversity.get("weights", []) if each.num_heads > 1]
    if weights:
        rows.append(["effective heads, weights", format_effective_heads(weights), ""])
    pairs = inspection.closest("weights", 1)
    if pairs:
        pair = pairs[0]
        where = f"{inspection.label(pair.name)}, heads {pair.first} and {pair.second}"
        rows.append(["most similar weights", f"{signed(pair.cosine)} ({where})", ""])
    if inspection.importance is not None:
        rows.append(_redundant(inspection))
    titles = ["measure", "this model", "untrained"]
    if not any(row[2] for row in rows):
        titles, rows = titles[:2], [row[:2] for row in rows]
    return [verdict(inspection), Table(titles, rows), *(f"note: {note}" for note in inspection.notes)]


def _sizes(inspection: Inspection) -> str:
    heads = sum(count for *_, count in inspection.layers)
    if not heads:
        return f"{count_of(len(inspection.groups), 'group')} of heads"
    return f"{heads} in {count_of(len(inspection.layers), 'layer')}, {count_of(inspection.items, 'input')} read"


def _mean(name: str, entries: Sequence[Compared]) -> list[list[str]]:
    """Make the row of the mean over all layers, with the most frequent verdict."""
    several = [each for each in entries if each.similarity.num_heads > 1 and not math.isnan(each.similarity.mean)]
    if not several:
        return []
    untrained = [each.mean.mean for each in several if not math.isnan(each.mean.mean)]
    mean = signed(statistics.fmean(each.similarity.mean for each in several))
    if not untrained:
        return [[name, mean, ""]]
    verdict, count = Counter(each.verdict for each in several).most_common(1)[0]
    short = verdict.removesuffix(" than chance")
    return [[name, f"{mean} ({short} in {count} of {len(several)})", signed(statistics.fmean(untrained))]]


def _largest(inspection: Inspection) -> list[list[str]]:
    """Make the row of the most similar attention logits of all layers."""
    several = [each for each in inspection.circuits.logits if each.similarity.num_heads > 1]
    if not several:
        return []
    top = max(several, key=lambda each: each.similarity.largest)
    pair = top.similarity.pair
    heads = "" if pair is None else f", heads {pair.first} and {pair.second}"
    where = f"{inspection.label(top.similarity.name)}{heads}"
    untrained = "" if math.isnan(top.largest.mean) else signed(top.largest.mean)
    return [["largest cosine, attention logits", f"{signed(top.similarity.largest)} ({where})", untrained]]


def _redundant(inspection: Inspection) -> list[str]:
    heads = redundant_heads(inspection)
    total = sum(count for *_, count in inspection.layers)
    kind = "redundant heads" if inspection.ablation is not None else "unimportant heads"
    by_layer: dict[str, list[str]] = {}
    for row, head in heads[:_LISTED]:
        by_layer.setdefault(inspection.label(inspection.layers[row][0]), []).append(str(head))
    named = [f"{layer}: {', '.join(numbers)}" for layer, numbers in by_layer.items()]
    more = [f"{len(heads) - _LISTED} more"] if len(heads) > _LISTED else []
    listed = f" ({'; '.join([*named, *more])})" if heads else ""
    return [kind, f"{len(heads)} of {total}{listed}", ""]
