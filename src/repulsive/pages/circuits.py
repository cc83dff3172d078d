"""Sections of the inspection page: similarity of heads in their attention logits and in their OV circuits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from repulsive.diagnostics.inspection import Inspection
from repulsive.diagnostics.summary import count_verdicts
from repulsive.diagnostics.untrained_baseline import DEVIATIONS, MARGIN, Compared, Null
from repulsive.pages.panels import Grid
from repulsive.pages.sections import grid_rows, scrolling_table
from repulsive.pages.text import escaped, mean_and_sd, number

_LOGITS = (
    "Two heads are alike here if they give the same attention logits: the cosine between their functions q(x) · k(y) "
    "over pairs of tokens of the inputs, keys centred per sequence. 1 is the same function, 0 is unrelated, −1 is "
    "opposite. Weights cannot show this: heads with orthogonal weights can compute the same logits."
)
_OV = (
    "The same for what a head writes: the cosine between the vectors that two heads add to the residual stream for a "
    "token they attend to (values times output projection), over tokens of the inputs."
)
_CHANCE = (
    "Untrained is the same architecture with fresh random weights: mean and standard deviation over {twins} such "
    f"models. A value differs from chance if it is more than {DEVIATIONS:g} standard deviations and more than "
    f"{MARGIN:g} away from untrained."
)
_COLUMNS = ("layer", "mean cosine", "against chance", "untrained", "most similar pair", "against chance", "untrained")
_CELLS = "cosine of two heads; opposite heads are drawn as unlike"
Cell = Callable[[Inspection, str], str]


def similarity_sections(inspection: Inspection, layer: Cell) -> str:
    """Both sections, or nothing where nothing was measured.

    Args:
        inspection: the inspection.
        layer: makes the first cell of a layer's row.
    """
    page = _section("Similarity of attention logits", _LOGITS, inspection.circuits.logits, inspection, layer)
    return page + _section("Similarity of value-output circuits", _OV, inspection.circuits.ov, inspection, layer)


def _section(title: str, lead: str, entries: Sequence[Compared], inspection: Inspection, layer: Cell) -> str:
    if not entries:
        return ""
    rows = "".join(_row(entry, inspection, layer) for entry in entries)
    head = "".join(f'<th scope="col">{name}</th>' for name in _COLUMNS)
    several = [entry.similarity for entry in entries if entry.similarity.num_heads > 1]
    grids = [Grid(inspection.label(each.name), each.cosine, _CELLS) for each in several]
    twins = len(entries[0].mean.values)
    chance = f"<p>{_CHANCE.format(twins=twins)}</p>\n" if twins else ""
    summary = f"<p><b>{escaped(count_verdicts(entries).capitalize())}.</b></p>\n" if twins else ""
    table = scrolling_table(f"{title}, layer by layer", head, rows)
    return f"<section><h2>{title}</h2>\n{summary}<p>{lead}</p>\n{chance}{table}{grid_rows(grids)}</section>\n"


def _row(entry: Compared, inspection: Inspection, layer: Cell) -> str:
    own, pair = entry.similarity, entry.similarity.pair
    most = "n/a" if pair is None else f"{pair.first} and {pair.second}: {number(pair.cosine, 3)}"
    cells = (
        number(own.mean, 3),
        _short(entry.verdict),
        _null(entry.mean),
        most,
        _short(entry.pair_verdict),
        _null(entry.largest),
    )
    return f"<tr>{layer(inspection, own.name)}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>\n"


def _short(verdict: str) -> str:
    """A verdict below a heading that says what it is against."""
    return verdict.removesuffix(" than chance")


def _null(null: Null) -> str:
    return mean_and_sd(null.mean, None if math.isnan(null.deviation) else null.deviation, 3)
