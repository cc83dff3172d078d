"""Sections of the inspection page: similarity of heads as functions and on the inputs, with verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from repulsive.diagnostics.inspection import Inspection
from repulsive.diagnostics.summary import count_verdicts
from repulsive.diagnostics.untrained_baseline import DEVIATIONS, MARGIN, Compared, Null, Space
from repulsive.pages.data.panels import Grid
from repulsive.pages.html.document import folded
from repulsive.pages.html.panel import grid_rows, scrolling_table
from repulsive.pages.text import escaped, mean_and_sd, number

_LOGITS = (
    "Two heads are similar here if they compute similar attention logits: the cosine between their functions "
    "q(x) · k(y) over pairs of input tokens, with keys centred per sequence. 1 means the same function, 0 unrelated, "
    "−1 opposite. Weights do not show this: heads with orthogonal weights can compute the same logits."
)
_OV = (
    "The cosine between the vectors that two heads add to the residual stream for a token that they attend to (values "
    "times output projection), over all input tokens, whether they attend to them or not."
)
_ATTENTION = (
    "The cosine between the attention weights of two heads on the inputs, minus uniform attention: otherwise two heads "
    "that attend nearly uniformly would have a cosine near 1."
)
_OUTPUTS = "The cosine between what two heads add to the residual stream on the inputs, after the output projection."
_CKA = (
    "Linear CKA of the same outputs, from 0 to 1: heads that carry the same information in another basis have 1. "
    "It is large for untrained heads, too, so compare it with those."
)
_CHANCE = (
    "Untrained means the same architecture with fresh random weights: mean and standard deviation over {twins} such "
    f"models. A value differs from chance if it is more than {DEVIATIONS:g} standard deviations and more than "
    f"{MARGIN:g} away from the untrained mean, with its whole confidence interval over the inputs."
)
_PERMUTED = (
    "Permuted heads are as many heads, drawn at random from different layers of this model. They show whether heads "
    "of one layer are more alike than heads of different layers. They do not show what training changed, and heads of "
    "one layer are expected to be somewhat more alike, since they read the same input."
)
_COLUMNS = (
    "95 % CI",
    "versus chance",
    "untrained",
    "versus permuted heads",
    "permuted heads",
    "most similar pair",
    "versus chance",
    "untrained",
)
_SECTIONS: tuple[tuple[Space, str, str], ...] = (
    ("logits", "Similarity of attention logits", _LOGITS),
    ("ov", "Similarity of value-output circuits", _OV),
    ("attention", "Similarity of attention maps", _ATTENTION),
    ("outputs", "Similarity of outputs", _OUTPUTS),
    ("cka", "CKA of outputs", _CKA),
)
_WITH_GRIDS = ("logits", "ov")  # the sections on diversity have those of attention and outputs
MEASURE = "cosine of two heads"
RowHeader = Callable[[Inspection, str], str]


def similarity_sections(
    inspection: Inspection, row_header: RowHeader, *, with_grids: bool = True, is_open: bool = False
) -> str:
    """Render one section per measure; a section without measurements is omitted.

    Args:
        inspection: the inspection.
        row_header: renders the first cell of a layer's row.
        with_grids: draw the cosines of all pairs of heads.
        is_open: unfolded at first.
    """
    page = ""
    for space, title, lead in _SECTIONS:
        entries = getattr(inspection.circuits, space)
        if entries:
            table = _table(space, title, entries, inspection, row_header)
            grids = _grids(entries, inspection) if with_grids and space in _WITH_GRIDS else []
            explained = "" if page else _explanation(entries)  # in the first section only
            page += folded(title, f"{_lead(lead, entries)}{explained}{table}{grid_rows(grids)}", is_open=is_open)
    return page


def _lead(lead: str, entries: Sequence[Compared]) -> str:
    """Render the numbers of verdicts, and what is measured."""
    twins = len(entries[0].mean.values)
    parts = [f"<b>{escaped(count_verdicts(entries).capitalize())}.</b>"] if twins else []
    if any(entry.similarity.permuted for entry in entries):
        counted = escaped(count_verdicts(entries, permuted=True))
        parts.append(f"Against permuted heads: {counted}.")
    summary = f"<p>{' '.join(parts)}</p>\n" if parts else ""
    return f"{summary}<p>{lead}</p>\n"


def _explanation(entries: Sequence[Compared]) -> str:
    """Render what values are compared with."""
    twins = len(entries[0].mean.values)
    chance = f"<p>{_CHANCE.format(twins=twins)}</p>\n" if twins else ""
    return chance + (f"<p>{_PERMUTED}</p>\n" if any(entry.similarity.permuted for entry in entries) else "")


def _table(space: Space, title: str, entries: Sequence[Compared], inspection: Inspection, row_header: RowHeader) -> str:
    rows = "".join(_row(entry, inspection, row_header) for entry in entries)
    columns = ("layer", "mean CKA" if space == "cka" else "mean cosine", *_COLUMNS)
    head = "".join(f'<th scope="col">{name}</th>' for name in columns)
    return scrolling_table(f"{title}, layer by layer", head, rows)


def _grids(entries: Sequence[Compared], inspection: Inspection) -> list[Grid]:
    with_pairs = [entry.similarity for entry in entries if entry.similarity.num_heads > 1]
    return [Grid(inspection.label(each.name), each.cosine, MEASURE) for each in with_pairs]


def _row(entry: Compared, inspection: Inspection, row_header: RowHeader) -> str:
    own, pair = entry.similarity, entry.similarity.pair
    closest = "n/a" if pair is None else f"{pair.first} and {pair.second}: {number(pair.cosine, 3)}"
    cells = (
        number(own.mean, 3),
        "n/a" if own.interval is None else f"{number(own.interval[0], 3)} to {number(own.interval[1], 3)}",
        _short(entry.verdict),
        _null(entry.mean),
        _short(entry.permuted_verdict),
        _null(entry.permuted),
        closest,
        _short(entry.pair_verdict),
        _null(entry.largest),
    )
    return f"<tr>{row_header(inspection, own.name)}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>\n"


def _short(verdict: str) -> str:
    """Drop "than chance" from a verdict, because the column header says it."""
    return verdict.removesuffix(" than chance")


def _null(null: Null) -> str:
    return mean_and_sd(null.mean, None if math.isnan(null.deviation) else null.deviation, 3)
