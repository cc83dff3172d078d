"""Head atlas: a grid of layers by heads, and a drawer with the details of one head, drawn by `ATLAS_SCRIPTS`."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

from repulsive.pages.data.atlas import AtlasLayer, pictures
from repulsive.pages.html.layer_explorer import packed
from repulsive.pages.text import escaped, script_json, visible

ATLAS_SCRIPTS = ("atlas_data.js", "drawer.js", "atlas.js")  # in this order, after attention_map.js
SIZES = (32, 24, 16, 12, 8)  # largest number of rows and columns of a picture
PICTURE_BYTES = 1_500_000  # limit for all pictures together; the explorer gets the rest of the file
_BADGES = {
    "first token": "F",
    "previous token": "P",
    "next token": "N",
    "same token": "S",
    "induction": "I",
    "separator": "D",
}
_BELOW, _ABOVE = ("l3", "l2", "l1", "h0"), ("h0", "h1", "h3", "h5", "h7", "h9")  # colours around uniform attention
_HELP = (
    "Each picture shows the attention of one head on the first example, compared with uniform attention. Rows are "
    "query tokens, columns are key tokens. Select a head for its details; arrow keys move between heads."
)

_KINDS = " Letters show how a head attends on other input, random tokens that are read twice."
_HELP_ON_PICTURES = (
    "Each tile shows the attention of one head from the chosen query to the patches of the chosen picture, compared "
    "with uniform attention over all tokens. Select a head to see it over the picture; arrow keys move between heads."
)

_FADE = (
    '<div class="controls" id="fade-controls" hidden><div class="choose">'
    '<button type="button" id="fade-before">before</button>'
    '<input type="range" id="fade" min="0" max="100" value="0" aria-label="Fade from before to after">'
    '<button type="button" id="fade-after">after</button></div></div>\n'
)


def head_atlas(
    layers: Sequence[AtlasLayer],
    room: int,
    *,
    metric: str = "",
    thresholds: Mapping[str, float] | None = None,
    on_pictures: bool = False,
    others: Sequence[AtlasLayer] = (),
    columns: Sequence[Sequence[tuple[int | None, int | None]]] = (),
) -> str:
    """Render the atlas, its legend, and the empty drawer.

    Args:
        layers: rows of the grid; at least one.
        room: bytes available. Pictures become coarser, or are left out, to fit.
        metric: description of the change of the output that ablation measures.
        thresholds: name of a kind -> the score that a head of this kind must exceed.
        on_pictures: the page has `picture_section`, whose data the atlas draws.
        others: rows of a second model, to fade to.
        columns: with `others`, the heads of both models in each cell of each row; None if one does not have it.
    """
    sides = [*layers, *others]
    numbers = [_numbers(layer) for layer in sides]
    room -= len(script_json(numbers)) + 8_000
    similarity: list[str | None] = [_similarity(layer) for layer in sides]
    warning = ""
    if sum(len(each or "") for each in similarity) > room / 2:
        similarity = [None] * len(sides)
        warning += '<p class="warn">Similarities are left out of the details, to keep this file small.</p>\n'
    room -= sum(len(each or "") for each in similarity)
    size = 0 if on_pictures else _size(sides, min(room, PICTURE_BYTES))
    if not size and not on_pictures and any(layer.weights is not None for layer in layers):
        warning += '<p class="warn">Pictures are left out, to keep this file small.</p>\n'
    rows = [
        {**own, **(_picture(layer, size) if size else {}), "similarity": cosines}
        for own, layer, cosines in zip(numbers, sides, similarity, strict=True)
    ]
    kinds = {kind: round(limit, 4) for kind, limit in (thresholds or {}).items()}
    data = script_json(
        {
            "layers": rows[: len(layers)],
            "after": rows[len(layers) :] or None,
            "columns": [[list(pair) for pair in row] for row in columns] if others else None,
            "badges": _BADGES,
            "thresholds": kinds,
            "metric": visible(metric),
        }
    )
    lead = _HELP_ON_PICTURES if on_pictures else _HELP
    lead += _KINDS if any(any(layer.kinds) for layer in sides) else ""
    return (
        f'<section id="atlas"><h2>Head atlas</h2>\n<p>{lead}</p>\n{warning}{_legend(sides, bool(others))}'
        f"{_FADE if others else ''}"
        "<noscript><p>The atlas needs JavaScript.</p></noscript>\n"
        '<div class="atlas" id="atlas-grid" role="grid" aria-label="Heads, layer by layer"></div>\n'
        f'<script type="application/json" id="atlas-data">{data}</script></section>\n'
        '<div id="drawer" class="drawer" role="dialog" aria-labelledby="drawer-title" tabindex="-1" hidden>'
        '<div class="drawer-bar"><h2 id="drawer-title"></h2>'
        '<button type="button" id="drawer-previous" aria-label="Previous head">‹</button>'
        '<button type="button" id="drawer-next" aria-label="Next head">›</button>'
        '<button type="button" id="drawer-close" aria-label="Close">✕</button></div>'
        '<div id="drawer-body"></div></div>\n'
    )


def _numbers(layer: AtlasLayer) -> dict[str, Any]:
    return {
        "label": visible(layer.label),
        "key": layer.label,  # name of the layer in the data of the explorer
        "heads": layer.heads,
        "importance": _rounded(layer.importance),
        "ablation": _rounded(layer.ablation),
        "kinds": list(layer.kinds),
        "scores": {kind: _rounded(values, 3) for kind, values in (layer.scores or {}).items()},
        "redundant": list(layer.redundant),
        "similar": {str(head): other for head, other in (layer.similar or {}).items()},
    }


def _picture(layer: AtlasLayer, size: int) -> dict[str, Any]:
    if layer.weights is None:
        return {}
    drawn = pictures(layer.weights, size)  # [M, t, s]
    text = base64.b64encode(bytes(drawn.flatten().tolist())).decode()
    return {"rows": drawn.shape[1], "columns": drawn.shape[2], "maps": text}


def _size(layers: Sequence[AtlasLayer], room: int) -> int:
    """Largest size of pictures that fits; 0 if none does."""

    def needed(size: int) -> int:
        shapes = [layer.weights.shape for layer in layers if layer.weights is not None]
        return sum(4 * math.ceil(m * min(t, size) * min(s, size) / 3) for m, t, s in shapes)

    return next((size for size in SIZES if needed(size) <= room), 0)


def _similarity(layer: AtlasLayer) -> str | None:
    """Pack the cosines of all pairs; -1 to 1 becomes 0 to 1."""
    return None if layer.similarity is None else packed((layer.similarity.cpu() + 1) / 2)


def _rounded(values: Sequence[float], digits: int = 4) -> list[float | None]:
    """Round to significant digits; nan and infinity become None."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]


def _legend(layers: Sequence[AtlasLayer], compares: bool = False) -> str:
    page = ""
    if any(layer.weights is not None for layer in layers):
        below, above = ("".join(f'<i class="{step}"></i>' for step in steps) for steps in (_BELOW, _ABOVE))
        page += (
            f'<p class="scale"><span>1/16</span>{below}<span class="zero">uniform</span>{above}'
            "<span>16 times</span></p>\n"
        )
    shown = {kind for layer in layers for kind in layer.kinds if kind}
    items = [
        f'<li><b class="badge k{index}">{letter}</b> {escaped(kind)}</li>'
        for index, (kind, letter) in enumerate(_BADGES.items(), 1)
        if kind in shown
    ]
    if any(layer.redundant for layer in layers):
        is_exact = any(layer.ablation for layer in layers)
        meaning = "redundant: the output hardly changes without it" if is_exact else "looks unimportant"
        items.append(f'<li><b class="mark redundant"></b> {meaning}</li>')
    if any(layer.similar for layer in layers):
        items.append('<li><b class="mark similar"></b> attends nearly like another head</li>')
    if compares:
        items.append('<li><b class="mark missing"></b> only the other model has this head</li>')
    return page + (f'<ul class="lines atlas-key">{"".join(items)}</ul>\n' if items else "")
