"""Page that compares the heads of two versions of a model: verdict, one atlas that fades between them, tables."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from repulsive.diagnostics.comparison_summary import comparison_json, comparison_verdict, format_change, layer_rows
from repulsive.diagnostics.model_comparison import ModelComparison
from repulsive.pages.card import Card
from repulsive.pages.data.atlas import atlas_layers
from repulsive.pages.data.card_atlas import card_tiles
from repulsive.pages.data.layers import Layered, Maps
from repulsive.pages.data.panels import Sheet
from repulsive.pages.data.pictures import Pictures, picture_maps
from repulsive.pages.html.atlas import ATLAS_SCRIPTS, head_atlas
from repulsive.pages.html.document import asset, document, fact_list, folded, header
from repulsive.pages.html.layer_explorer import layer_explorer
from repulsive.pages.html.panel import sheet_table
from repulsive.pages.html.picture_map import picture_section
from repulsive.pages.inspection_page import layered_examples
from repulsive.pages.report_page import FRAME_BYTES, MAX_BYTES
from repulsive.pages.text import escaped, number

SIDES = ("before", "after")
_LEAD = (
    "The interval is Student's t over groups of the inputs. It says whether these two models would differ on other "
    "inputs of the same kind; it says nothing about other training runs. If the models have different numbers of "
    "heads, heads are matched by their weights. Layers and heads are counted from 0."
)


def comparison_card(comparison: ModelComparison, name: str, pictures: Pictures | None = None) -> Card:
    """Collect the content of the social card: the atlas before above the atlas after; removed heads are plain tiles.

    Args:
        comparison: result of `compare_models`.
        name: name of the model.
        pictures: the inputs, if they are pictures.
    """
    sides = (comparison.before, comparison.after)
    counts = [str(sum(count for *_, count in side.layers)) for side in sides]
    layers = len(comparison.columns)
    sizes = f"{layers} layer{'' if layers == 1 else 's'}, {format_change(*counts)} heads"
    aligned = [
        [_aligned(drawn, [pair[at] for pair in row]) for drawn, row in zip(tiles, comparison.columns, strict=True)]
        for at, tiles in enumerate(card_tiles(side, pictures) for side in sides)
    ]
    return Card(name, comparison_verdict(comparison), sizes, aligned, [[len(row) for row in comparison.columns]] * 2)


def _aligned(drawn: Tensor | None, heads: Sequence[int | None]) -> Tensor | None:
    """Put pictures [M, t, s] into the given order; a missing head becomes an empty picture."""
    if drawn is None:
        return None
    empty = torch.zeros_like(drawn[0])
    return torch.stack([empty if head is None else drawn[head] for head in heads])


def encode_comparison(comparison: ModelComparison) -> str:
    """Encode the numbers of a comparison as in `inspect.json`."""
    return json.dumps(comparison_json(comparison), indent=1, allow_nan=False)


def render_comparison(
    comparison: ModelComparison,
    *,
    title: str,
    facts: Sequence[tuple[str, str]] = (),
    tokens: Sequence[Sequence[str]] = (),
    pictures: Pictures | None = None,
    max_bytes: int = MAX_BYTES,
) -> str:
    """Render the page as a string. Maps that do not fit are averaged or left out, and the page says so.

    Args:
        comparison: result of `compare_models`.
        title: page title.
        facts: (name, value) pairs at the end of the page.
        tokens: tokens of the inputs; if missing, positions are numbered.
        pictures: the inputs, if they are pictures.
        max_bytes: maximum size of the page.
    """
    layers, others = atlas_layers(comparison.before), atlas_layers(comparison.after)
    maps = [picture_maps(side, pictures) if pictures else [] for side in (comparison.before, comparison.after)]
    on_pictures = pictures is not None and all(maps)
    names = ("attention_map.js", "picture_map.js" if on_pictures else "layer_explorer.js", *ATLAS_SCRIPTS)
    script = "".join(asset(name) for name in names)
    before = header(title, comparison_verdict(comparison), lead_class="verdict")
    after = fact_list([*facts, *_sizes(comparison)]) + _notes(comparison)
    tables = _tables(comparison, is_open=not layers)
    room = (
        max_bytes - FRAME_BYTES - sum(len(part.encode()) for part in (asset("page.css"), script, before, after, tables))
    )
    atlas = ""
    if layers:
        kinds = comparison.before.kinds
        atlas = head_atlas(
            layers,
            room,
            metric=comparison.before.metric,
            thresholds=kinds.thresholds if kinds else {},
            on_pictures=on_pictures,
            others=others,
            columns=comparison.columns,
        )
    if pictures is not None and on_pictures:
        shown = picture_section(maps[0], pictures.layout, room - len(atlas.encode()), others=maps[1])
        atlas = f'<div class="pictured">{shown}{atlas}</div>\n'
    examples = [] if on_pictures else _examples(comparison, tokens)
    explorer = layer_explorer(examples, SIDES, room - len(atlas.encode())) if examples else ""
    if explorer:
        explorer = folded("Attention, layer by layer", explorer)
    body = f'{before}{atlas}<section class="folds"><h2>Evidence</h2>\n<p>{_LEAD}</p>\n{tables}{explorer}</section>\n'
    return document(title, body + after, script=script if atlas or explorer else "", has_pictures=on_pictures)


def _tables(comparison: ModelComparison, *, is_open: bool) -> str:
    titles, rows = layer_rows(comparison)
    page = folded("Layers, before → after", sheet_table(Sheet("Before → after", titles, rows)), is_open=True)
    sheet = _importance(comparison)
    return page + (folded("Importance of heads, before → after", sheet_table(sheet), is_open=is_open) if sheet else "")


def _importance(comparison: ModelComparison) -> Sheet | None:
    """Tabulate the importance of each head before and after; None if it was not measured."""
    scores = comparison.before.importance, comparison.after.importance
    if scores[0] is None or scores[1] is None:
        return None
    most = max(len(columns) for columns in comparison.columns)
    rows = []
    for row, (columns, (name, *_)) in enumerate(zip(comparison.columns, comparison.before.layers, strict=True)):
        cells = []
        for own, other in columns:
            first = "none" if own is None else number(float(scores[0][row, own]), 2)
            second = "removed" if other is None else number(float(scores[1][row, other]), 2)
            cells.append(f"{first} → {second}")
        rows.append([comparison.before.label(name), *cells, *[""] * (most - len(cells))])
    return Sheet("First-order importance, l2-normalised per layer", ["layer", *map(str, range(most))], rows)


def _examples(comparison: ModelComparison, tokens: Sequence[Sequence[str]]) -> list[Layered]:
    """Combine the maps of both models; layers have the names of the first model."""
    sides = [layered_examples(side, tokens) for side in (comparison.before, comparison.after)]
    names = {
        comparison.after.label(other): comparison.before.label(own)
        for (own, *_), (other, *_) in zip(comparison.before.layers, comparison.after.layers, strict=True)
    }
    examples = []
    for first, second in zip(*sides, strict=False):
        (own,), (other,) = first.readings.values(), second.readings.values()
        renamed = [Maps(names.get(m.layer, m.layer), m.weights, m.rows, m.columns) for m in other]
        examples.append(Layered({**second.texts, **first.texts}, {SIDES[0]: own, SIDES[1]: renamed}))
    return examples


def _sizes(comparison: ModelComparison) -> list[tuple[str, str]]:
    counts = [sum(heads for *_, heads in side.layers) for side in (comparison.before, comparison.after)]
    return [("Attention layers", str(len(comparison.before.layers))), ("Heads", format_change(*map(str, counts)))]


def _notes(comparison: ModelComparison) -> str:
    notes = dict.fromkeys([*comparison.notes, *comparison.before.notes, *comparison.after.notes])
    items = "".join(f"<li>{escaped(note)}</li>" for note in notes)
    return f'<section><h2>Not measured</h2>\n<ul class="notes">{items}</ul></section>\n' if items else ""
