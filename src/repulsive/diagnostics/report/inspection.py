"""The page of an inspection: how diverse each layer's heads are, which are alike, and which could go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from repulsive.diagnostics.inspection import Inspection
from repulsive.diagnostics.report.content import Example, Reading
from repulsive.diagnostics.report.frame import document, header, write_whole
from repulsive.diagnostics.report.heads import head_maps
from repulsive.diagnostics.report.maps import LEVELS, overlap_grid, scale
from repulsive.diagnostics.report.text import escaped, number

_SPACES = {
    "weights": "the weights of their projections",
    "attention": "what they look at",
    "outputs": "what leaves them",
}


def write_inspection(
    path: str | Path,
    found: Inspection,
    *,
    title: str,
    facts: Sequence[tuple[str, str]] = (),
    tokens: Sequence[Sequence[str]] = (),
) -> Path:
    """Write the page of an inspection, one HTML file that asks for nothing outside of itself and runs no script.

    Args:
        path: the HTML file; its folder is made.
        found: what `inspect_heads` returned.
        title: of the page.
        facts: (name, value) pairs at its top.
        tokens: the words of the inputs in `found.looked`; none: what heads look at is not drawn.
    """
    return write_whole(path, render_inspection(found, title=title, facts=facts, tokens=tokens))


def render_inspection(
    found: Inspection,
    *,
    title: str,
    facts: Sequence[tuple[str, str]] = (),
    tokens: Sequence[Sequence[str]] = (),
) -> str:
    """The page as a string; arguments as in `write_inspection`."""
    lead = "Effective heads run from 1 (all alike) to the number of heads (none like another)."
    body = "".join(_space(space, found) for space in _SPACES if space in found.diversity)
    body += _pairs(found) + _redundancy(found) + _looked(found, tokens)
    notes = "".join(f"<li>{escaped(note)}</li>" for note in found.notes)
    body += f'<section><h2>Not measured</h2>\n<ul class="notes">{notes}</ul></section>\n' if notes else ""
    return document(title, header(title, lead, facts) + body)


def head_grid(scores: Tensor, names: Sequence[str], what: str) -> str:
    """Layers down, heads across, the colour of a cell its score; every number is in its row's text.

    Args:
        scores: [L, M], not negative; nan where a layer has no such head.
        names: of the layers.
        what: the scores are, in words.
    """
    top = float(scores.nan_to_num().max())
    steps = (LEVELS * (scores.nan_to_num() / (top or 1)).clamp(0, 1)).round().long()  # [L, M]
    rows = ""
    for name, row, step in zip(names, scores.tolist(), steps.tolist(), strict=True):
        shown = "".join(
            f'<td class="h{level}">{number(value, 3) if top >= 0.01 else f"{value:.1e}"}</td>'
            for value, level in zip(row, step, strict=True)
            if not math.isnan(value)
        )
        rows += f'<tr><th scope="row">{escaped(name)}</th>{shown}</tr>\n'
    heads = "".join(f'<th scope="col">{head}</th>' for head in range(scores.shape[1]))
    return _table(what, f'<th scope="col">layer, head</th>{heads}', rows)


def _space(space: str, found: Inspection) -> str:
    entries = found.diversity[space]
    rows = "".join(
        f'<tr><th scope="row">{escaped(d.name)}</th><td>{d.num_heads}</td><td>{d.effective_heads:.2f}</td>'
        f"<td>{number(d.mean_cosine, 3)}</td><td>{d.mean_distance:.4g}</td></tr>\n"
        for d in entries
    )
    names = ("layer", "heads", "effective heads", "mean cosine", "mean distance")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    grids = "".join(overlap_grid(d.cosine.cpu(), found.label(d.name)) for d in entries if d.num_heads > 1)
    return (
        f"<section><h2>How alike heads are in {_SPACES[space]}</h2>\n{_table(f'Diversity of {space}', head, rows)}"
        f"{scale('1', 'cosine of two heads; opposite heads are drawn as unlike')}"
        f'<div class="overlaps">{grids}</div></section>\n'
    )


def _pairs(found: Inspection) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escaped(pair.name)}</th><td>{space}</td><td>{pair.first} and {pair.second}</td>'
        f"<td>{number(pair.cosine, 3)}</td></tr>\n"
        for space in _SPACES
        for pair in found.closest(space)
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("layer", "space", "heads", "cosine"))
    return f"<section><h2>Most similar pairs</h2>\n{_table('Most similar pairs', head, rows)}</section>\n"


def _redundancy(found: Inspection) -> str:
    names = [name for name, *_ in found.layers]
    page = ""
    if found.importance is not None:
        page += head_grid(found.importance, names, "First-order importance, l2-normalised per layer")
    if found.ablation is not None:
        page += head_grid(found.ablation.change.clamp(min=0), names, f"Exact ablation of one head: {found.metric}")
    return f"<section><h2>Which heads could go</h2>\n{page}</section>\n" if page else ""


def _looked(found: Inspection, tokens: Sequence[Sequence[str]]) -> str:
    page = ""
    for words, layers in zip(tokens, found.looked, strict=False):
        if any(weights.shape[1] != len(words) for weights in layers.values()):
            continue  # cross-attention looks at another text
        readings = [
            Reading(found.label(name), "", 0.0, torch.as_tensor(weights, dtype=torch.float64))
            for name, weights in layers.items()
        ]
        page += head_maps(Example(words, "", readings), {})
    lead = (
        "<p>How much of each head's attention every token receives, averaged over the tokens that look. In these maps "
        "heads are numbered from 1, above from 0.</p>\n"
    )
    return f"<section><h2>What each head reads</h2>\n{lead}{page}</section>\n" if page else ""


def _table(caption: str, head: str, rows: str) -> str:
    said = escaped(caption)
    return (
        f'<p class="caption">{said}</p>\n<div class="scroll" role="region" aria-label="{said}" tabindex="0">'
        f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody></table></div>\n"
    )
