"""Summarise an inspection in one sentence: redundant heads, and layers whose heads attend alike.

A head is redundant if the model without it (`ablation`) gives nearly the same output: the KL divergence is below 0.001
nats, which moves the output probabilities by at most 2.2 % (Pinsker's inequality), or the output states change by less
than 1 %. Heads are removed one at a time: removing several redundant heads together may change the output more.
Without ablation, a head counts as unimportant if its first-order importance is below a tenth of the root mean square
over the heads of its layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from repulsive.diagnostics.inspection import Inspection
from repulsive.diagnostics.output_change import METRICS
from repulsive.diagnostics.untrained_baseline import AS_CHANCE, MORE_ALIKE, MORE_DIFFERENT, UNKNOWN, Compared
from repulsive.heads.describe import count_of

KL_LIMIT, STATES_LIMIT = 0.001, 0.01
IMPORTANCE_SHARE = 0.1
NEARLY_EQUAL = 0.9  # cosine of the weights of two heads
NEARLY_ALIKE = 0.8  # cosine of the attention logits of two heads
_MAX_RANGES = 4  # longer lists of layers are summarised
_CHANGES = {
    METRICS["logits"]: (KL_LIMIT, f"a KL divergence below {KL_LIMIT:g} nats"),
    METRICS["states"]: (STATES_LIMIT, f"less than {STATES_LIMIT:.0%}".replace("%", " %")),
}


def verdict(inspection: Inspection) -> str:
    """Write the most important result of an inspection as one sentence.

    Args:
        inspection: result of `inspect_heads`.
    """
    compared = [each for each in inspection.circuits.logits if each.verdict != UNKNOWN]
    if inspection.importance is None and not inspection.circuits.logits:
        return _on_weights(inspection)
    if looks_untrained(inspection):
        layers = len(inspection.circuits.logits)
        who = "its layer does not differ" if layers == 1 else "no layer differs"
        clearly = "" if len(compared) == layers else " clearly"
        return f"This model looks untrained: {who}{clearly} from untrained twins in how similar its heads are."
    parts = [_on_redundancy(inspection), *_on_similarity(inspection, compared)]
    parts = [part for part in parts if part]
    if parts:
        return _sentence("; ".join(parts))
    nothing = []
    if inspection.importance is not None:
        nothing.append("no head is redundant" if _has_limit(inspection) else "no head looks unimportant")
    if compared:
        nothing.append("heads attend as alike as in untrained twins")
    elif all(math.isnan(each.mean.mean) for each in inspection.circuits.logits):
        nothing.append("heads were not compared with untrained twins")
    else:
        one_twin = all(len(each.mean.values) < 2 for each in inspection.circuits.logits)
        missing = "at least two untrained twins" if one_twin else "more inputs"
        nothing.append(f"the comparison with untrained twins is inconclusive (needs {missing})")
    return f"Nothing stands out: {', and '.join(nothing)}."


def looks_untrained(inspection: Inspection) -> bool:
    """Check if no layer differs from untrained twins, in attention logits or OV circuits, and no head has a kind.

    At least half of the comparisons must have a result: a few inputs show hardly any difference.
    """
    entries = [*inspection.circuits.logits, *inspection.circuits.ov]
    verdicts = [each for entry in entries for each in (entry.verdict, entry.pair_verdict) if each != UNKNOWN]
    has_kinds = inspection.kinds is not None and bool(inspection.kinds.labels())
    has_result = 2 * sum(entry.verdict != UNKNOWN for entry in entries) >= len(entries) > 0
    return has_result and all(each == AS_CHANCE for each in verdicts) and not has_kinds


def redundant_heads(inspection: Inspection) -> list[tuple[int, int]]:
    """List the redundant heads, or the unimportant ones without ablation, as (index in `layers`, head)."""
    result = []
    for row, (*_, count) in enumerate(inspection.layers):
        for head in range(count):
            if _has_limit(inspection) and inspection.ablation is not None:
                low = float(inspection.ablation.change[row, head]) < _CHANGES[inspection.metric][0]
            elif inspection.importance is not None:
                low = float(inspection.importance[row, head]) < IMPORTANCE_SHARE / count**0.5
            else:
                low = False
            if low:
                result.append((row, head))
    return result


def similar_heads(inspection: Inspection) -> dict[tuple[int, int], tuple[int, float]]:
    """Map heads that attend nearly like another head of their layer: a cosine of at least 0.8, and more than chance.

    Returns:
        (index in `layers`, head) -> (the most similar other head, cosine of their attention logits).
    """
    rows = {name: row for row, (name, *_) in enumerate(inspection.layers)}
    result = {}
    for entry in inspection.circuits.logits:
        own = entry.similarity
        if own.name not in rows or own.num_heads < 2:
            continue
        others = own.cosine.clone().fill_diagonal_(-2.0)
        for head, (cosine, other) in enumerate(zip(*(x.tolist() for x in others.max(-1)), strict=True)):
            if cosine >= NEARLY_ALIKE and entry.largest.verdict(cosine) in (MORE_ALIKE, UNKNOWN):
                result[rows[own.name], head] = (other, cosine)
    return result


def name_layers(labels: Sequence[str]) -> str:
    """Name layers in few words.

    Example:
        >>> name_layers(["layer 0", "layer 4", "layer 5", "layer 6"]), name_layers(["encoder layer 2"])
        ('layers 0 and 4 to 6', 'encoder layer 2')
    """
    stacks: dict[str, list[int]] = {}
    others = []
    for label in labels:
        match = re.fullmatch(r"(|.+ )layer (\d+)", label)
        if match:
            stacks.setdefault(match[1], []).append(int(match[2]))
        else:
            others.append(label)
    if len(others) > _MAX_RANGES:
        others = [*others[: _MAX_RANGES - 1], f"{len(others) - _MAX_RANGES + 1} more layers"]
    named = [f"{stack}{_ranges(sorted(numbers))}" for stack, numbers in stacks.items()]
    return _listed([*named, *others])


def _on_redundancy(inspection: Inspection) -> str:
    heads = redundant_heads(inspection)
    if not heads:
        return ""
    rows = sorted({row for row, _ in heads})
    where = name_layers([inspection.label(inspection.layers[row][0]) for row in rows])
    count = f"{where} {'has' if len(rows) == 1 else 'have'} {count_of(len(heads), 'head')}"
    if not _has_limit(inspection):
        return f"{count} that look{'s' if len(heads) == 1 else ''} unimportant (first-order estimate)"
    change = _CHANGES[inspection.metric][1]
    without = "it" if len(heads) == 1 else "any one of them"
    return f"{count} the model would not miss (without {without} its output changes by {change})"


def _on_similarity(inspection: Inspection, compared: Sequence[Compared]) -> list[str]:
    alike = [each for each in compared if each.verdict == MORE_ALIKE]
    different = [each for each in compared if each.verdict == MORE_DIFFERENT]
    pairs = [each for each in compared if each.verdict != MORE_ALIKE and each.pair_verdict == MORE_ALIKE]
    parts = []
    for entries, text in ((alike, "more alike than chance"), (different, "more differently than chance")):
        if entries:
            parts.append(f"heads of {_layers_of(inspection, entries)} attend {text}")
    if pairs:
        each, has = ("", "has") if len(pairs) == 1 else (" each", "have")
        parts.append(f"{_layers_of(inspection, pairs)}{each} {has} a pair of heads more alike than chance")
    return parts


def _on_weights(inspection: Inspection) -> str:
    reason = "only weights were compared, which do not show whether heads attend alike"
    (pair,) = inspection.closest("weights", 1) or (None,)
    if pair is None or pair.cosine < NEARLY_EQUAL:
        return _sentence(f"{reason}; add inputs to measure that")
    heads = f"heads {pair.first} and {pair.second} of {inspection.label(pair.name)}"
    return _sentence(f"{heads} have nearly the same weights (cosine {pair.cosine:.2f}); {reason}")


def _has_limit(inspection: Inspection) -> bool:
    return inspection.ablation is not None and inspection.metric in _CHANGES


def _layers_of(inspection: Inspection, entries: Sequence[Compared]) -> str:
    return name_layers([inspection.label(each.similarity.name) for each in entries])


def _ranges(numbers: Sequence[int]) -> str:
    """Write increasing numbers of layers: "layer 3", "layers 0, 2 and 4 to 6"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    if len(runs) > _MAX_RANGES:
        return f"{len(numbers)} of the layers {numbers[0]} to {numbers[-1]}"
    parts = []
    for run in runs:
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(number) for number in run]
    return f"layer{'' if len(numbers) == 1 else 's'} {_listed(parts)}"


def _listed(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
