"""Sections of the inspection page: similarity of attention logits and of value-output circuits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from repulsive.diagnostics.inspection import Inspection
from repulsive.diagnostics.summary import count_verdicts
from repulsive.diagnostics.untrained_baseline import DEVIATIONS, MARGIN, Compared, Null
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
    "The same for head outputs: the cosine between the vectors that two heads add to the residual stream for a token "
    "they attend to (values times output projection), over the input tokens."
)
_CHANCE = (
    "Untrained means the same architecture with fresh random weights: mean and standard deviation over {twins} such "
    f"models. A value differs from chance if it is more than {DEVIATIONS:g} standard deviations and more than "
    f"{MARGIN:g} away from the untrained mean."
)
_COLUMNS = ("layer", "mean cosine", "versus chance", "untrained", "most similar pair", "versus chance", "untrained")
MEASURE = "cosine of two heads"
RowHeader = Callable[[Inspection, str], str]


def similarity_sections(
    inspection: Inspection, row_header: RowHeader, *, with_grids: bool = True, is_open: bool = False
) -> str:
    """Render both sections; a section without measurements is omitted.

    Args:
        inspection: the inspection.
        row_header: renders the first cell of a layer's row.
        with_grids: draw the cosines of all pairs of heads.
        is_open: unfolded at first.
    """
    page = ""
    for title, lead, entries in (
        ("Similarity of attention logits", _LOGITS, inspection.circuits.logits),
        ("Similarity of value-output circuits", _OV, inspection.circuits.ov),
    ):
        if entries:
            body = _body(title, lead, entries, inspection, row_header, with_grids)
            page += folded(title, body, is_open=is_open)
    return page


def _body(
    title: str, lead: str, entries: Sequence[Compared], inspection: Inspection, row_header: RowHeader, with_grids: bool
) -> str:
    rows = "".join(_row(entry, inspection, row_header) for entry in entries)
    head = "".join(f'<th scope="col">{name}</th>' for name in _COLUMNS)
    with_pairs = [entry.similarity for entry in entries if entry.similarity.num_heads > 1]
    grids = [Grid(inspection.label(each.name), each.cosine, MEASURE) for each in with_pairs]
    twins = len(entries[0].mean.values)
    chance = f"<p>{_CHANCE.format(twins=twins)}</p>\n" if twins else ""
    summary = f"<p><b>{escaped(count_verdicts(entries).capitalize())}.</b></p>\n" if twins else ""
    table = scrolling_table(f"{title}, layer by layer", head, rows)
    return f"{summary}<p>{lead}</p>\n{chance}{table}{grid_rows(grids if with_grids else [])}"


def _row(entry: Compared, inspection: Inspection, row_header: RowHeader) -> str:
    own, pair = entry.similarity, entry.similarity.pair
    closest = "n/a" if pair is None else f"{pair.first} and {pair.second}: {number(pair.cosine, 3)}"
    cells = (
        number(own.mean, 3),
        _short(entry.verdict),
        _null(entry.mean),
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
