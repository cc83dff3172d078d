"""Table of the similarity of heads per layer: value, interval, untrained twins, permuted heads, verdicts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from repulsive.diagnostics.circuits import Similarity
from repulsive.diagnostics.untrained_baseline import Compared, Null, Space

TITLES: dict[Space, str] = {
    "logits": "attention logits (QK circuits)",
    "ov": "OV circuits",
    "attention": "attention weights minus uniform attention",
    "outputs": "contributions after the output projection",
    "cka": "linear CKA of contributions after the output projection",
}


class SimilarityTable(list[Similarity]):
    """Similarity of heads, one entry per layer, with verdicts. Its repr is a table.

    Args:
        space: where heads are compared.
        compared: similarity and null distribution of each layer.
        notes: reasons why layers were not measured, or why there are no twins.
    """

    def __init__(self, space: Space, compared: Iterable[Compared], notes: Sequence[str] = ()) -> None:
        self.space = space
        self.compared = list(compared)
        self.notes = tuple(notes)
        super().__init__(each.similarity for each in self.compared)

    @property
    def verdicts(self) -> list[str]:
        """Verdict on the mean of each layer: more alike than chance, as chance, more different, or cannot say."""
        return [each.verdict for each in self.compared]

    @property
    def pair_verdicts(self) -> list[str]:
        """Verdict on the most similar pair of each layer. A low mean can hide two duplicate heads."""
        return [each.pair_verdict for each in self.compared]

    @property
    def permuted_verdicts(self) -> list[str]:
        """Verdict on the mean of each layer against heads drawn from different layers."""
        return [each.permuted_verdict for each in self.compared]

    def __repr__(self) -> str:
        score = "CKA" if self.space == "cka" else "cosine"
        counted = ", ".join(f"{verdict}: {count}" for verdict, count in Counter(self.verdicts).most_common())
        own_columns = ("layer", f"mean {score}", "untrained", "verdict", "permuted heads", "verdict")
        rows = [(*own_columns, "closest pair", score, "untrained", "verdict")]
        for each in self.compared:
            own, pair = each.similarity, each.similarity.pair
            rows.append(
                (
                    own.name or "(model)",
                    _with_interval(own.mean, own.interval),
                    format_null(each.mean),
                    each.verdict,
                    format_null(each.permuted),
                    each.permuted_verdict,
                    "n/a" if pair is None else f"{pair.first} and {pair.second}",
                    _with_interval(own.largest, own.pair_interval),
                    format_null(each.largest),
                    each.pair_verdict,
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        title = f"similarity of heads in {TITLES[self.space]}; layers {counted or 'none'}"
        return "\n".join([title, *lines, *(f"note: {note}" for note in self.notes)])


def _with_interval(value: float, interval: tuple[float, float] | None) -> str:
    if math.isnan(value):
        return "n/a"
    return f"{value:+.3f}" + ("" if interval is None else f" {format_interval(interval)}")


def format_interval(interval: tuple[float, float] | None) -> str:
    """Format a confidence interval; "n/a" for None."""
    return "n/a" if interval is None else f"[{interval[0]:+.3f}, {interval[1]:+.3f}]"


def format_null(null: Null) -> str:
    """Format the mean and standard deviation of untrained twins or draws; "n/a" if there are none."""
    if math.isnan(null.mean):
        return "n/a"
    return f"{null.mean:+.3f}" + ("" if math.isnan(null.deviation) else f" +- {null.deviation:.3f}")
