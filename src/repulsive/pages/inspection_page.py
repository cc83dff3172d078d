"""Report on the heads of one model: verdict, head atlas, and the evidence behind them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from repulsive.diagnostics.inspection import Inspection
from repulsive.diagnostics.summary import as_json, format_distance, format_effective_heads
from repulsive.diagnostics.verdict import verdict
from repulsive.errors import RunError
from repulsive.pages.card import Card
from repulsive.pages.charts import pruning_chart, redundancy_charts
from repulsive.pages.data.atlas import atlas_layers
from repulsive.pages.data.card_atlas import card_tiles
from repulsive.pages.data.layers import Layered, Maps
from repulsive.pages.data.panels import Grid, HeadTable
from repulsive.pages.data.pictures import Pictures, picture_maps
from repulsive.pages.html.atlas import ATLAS_SCRIPTS, head_atlas
from repulsive.pages.html.circuits import MEASURE, similarity_sections
from repulsive.pages.html.document import asset, document, fact_list, folded, header, write_whole
from repulsive.pages.html.layer_explorer import layer_explorer
from repulsive.pages.html.panel import charts_with_legend, grid_rows, head_table, scrolling_table
from repulsive.pages.html.picture_map import picture_section
from repulsive.pages.report_page import FRAME_BYTES, MAX_BYTES
from repulsive.pages.text import escaped, number
from repulsive.safety import files as safe

_SPACES = ("weights", "attention", "outputs")
_DIVERSITY = {
    "weights": "Weights do not show whether heads compute the same: random weights of many dimensions are nearly "
    "orthogonal.",
    "attention": "Attention weights are all positive: heads that attend nearly uniformly have cosines near 1 and few "
    "effective heads, also in an untrained model. The similarity of attention maps corrects for this.",
    "outputs": "Before the output projection each head has a basis of its own, so cosines near 0 are expected. The "
    "cosine of tokens compares the outputs of all heads together for two tokens of the same input. Near 1, the layers "
    "above cannot distinguish tokens: the model is untrained, or its outputs are constant.",
}
_LEAD = (
    "The number of effective heads ranges from 1 (all heads are the same) to the number of heads (all are different). "
    "Layers and heads are counted from 0."
)
_LEFT_OUT = "The grids of pairwise cosines are left out, to keep this file small; inspect.json has the numbers."
_EVIDENCE_SHARE = 0.6  # of the file; with more heads, grids are left out
_METHOD = "model"  # the only method of this page


def write_page_and_numbers(folder: Path, page: str, numbers: str) -> Path:
    """Write a page as `inspect.html` and its numbers as `inspect.json`; return the path of the page.

    Raises:
        RunError: the folder cannot be written.
    """
    try:
        written = write_whole(folder / "inspect.html", page)
        safe.write_whole(folder / "inspect.json", numbers.encode())
    except OSError as error:
        raise RunError(f"{str(folder)!r}: cannot be written ({error.strerror}); choose another folder") from None
    return written


def inspection_json(inspection: Inspection) -> str:
    """Encode the numbers of an inspection as in `inspect.json`."""
    return json.dumps(as_json(inspection), indent=1, allow_nan=False)


def inspection_card(inspection: Inspection, name: str, pictures: Pictures | None = None) -> Card:
    """Collect the content of the social card of an inspection.

    Args:
        inspection: result of `inspect_heads`.
        name: name of the model.
        pictures: the inputs, if they are pictures.
    """
    heads = [count for *_, count in inspection.layers]
    sizes = f"{len(heads)} layer{'' if len(heads) == 1 else 's'}, {sum(heads)} heads"
    return Card(name, verdict(inspection), sizes, [card_tiles(inspection, pictures)], [heads])


def render_inspection(
    inspection: Inspection,
    *,
    title: str,
    facts: Sequence[tuple[str, str]] = (),
    tokens: Sequence[Sequence[str]] = (),
    pictures: Pictures | None = None,
    max_bytes: int = MAX_BYTES,
) -> str:
    """Render the page as a string. Maps that do not fit are averaged or left out, and the page says so.

    Args:
        inspection: result of `inspect_heads`.
        title: page title.
        facts: (name, value) pairs at the top of the page.
        tokens: tokens of the inputs in `inspection.maps`; if missing, positions are numbered.
        pictures: the inputs, if they are pictures.
        max_bytes: maximum size of the page.
    """
    layers = atlas_layers(inspection)
    maps = picture_maps(inspection, pictures) if pictures is not None else []
    names = ("attention_map.js", "picture_map.js" if maps else "layer_explorer.js", *ATLAS_SCRIPTS)
    script = "".join(asset(name) for name in names)
    before = header(title, verdict(inspection), lead_class="verdict")
    after = fact_list([*facts, *_sizes(inspection)]) + _notes(inspection)
    fixed = sum(len(part.encode()) for part in (asset("page.css"), script, before, after)) + FRAME_BYTES
    evidence = _evidence(inspection, is_open=not layers)
    if fixed + len(evidence.encode()) > max_bytes * _EVIDENCE_SHARE:
        evidence = f'<p class="warn">{_LEFT_OUT}</p>\n' + _evidence(inspection, is_open=not layers, with_grids=False)
    room = max_bytes - fixed - len(evidence.encode())
    thresholds = inspection.kinds.thresholds if inspection.kinds else {}
    atlas = ""
    if layers:
        atlas = head_atlas(
            layers, room, metric=inspection.metric, thresholds=thresholds, on_pictures=bool(pictures and maps)
        )
    if pictures is not None and maps:
        shown = picture_section(maps, pictures.layout, room - len(atlas.encode()))
        atlas = f'<div class="pictured">{shown}{atlas}</div>\n'
    examples = [] if maps else layered_examples(inspection, tokens)
    explorer = layer_explorer(examples, [_METHOD], room - len(atlas.encode())) if examples else ""
    if explorer:
        explorer = folded("Attention, layer by layer", explorer)
    body = f'{before}{atlas}<section class="folds"><h2>Evidence</h2>\n<p>{_LEAD}</p>\n{explorer}{evidence}</section>\n'
    return document(title, body + after, script=script if atlas or explorer else "", has_pictures=bool(maps))


def _evidence(inspection: Inspection, *, is_open: bool, with_grids: bool = True) -> str:
    """Render tables and charts, each section folded unless `is_open`."""
    page = similarity_sections(inspection, _row_header, with_grids=with_grids, is_open=is_open)
    sections = [("Redundant heads", _redundancy(inspection)), ("Most similar pairs", _closest_pairs(inspection))]
    sections += [(f"Diversity of {space}", _diversity(space, inspection, with_grids)) for space in _SPACES]
    return page + "".join(folded(title, body, is_open=is_open) for title, body in sections if body)


def _notes(inspection: Inspection) -> str:
    notes = "".join(f"<li>{escaped(note)}</li>" for note in inspection.notes)
    return f'<section><h2>Not measured</h2>\n<ul class="notes">{notes}</ul></section>\n' if notes else ""


def layered_examples(inspection: Inspection, tokens: Sequence[Sequence[str]]) -> list[Layered]:
    """Combine the maps of an inspection with their tokens; positions without tokens are numbered."""
    examples = []
    for item, layers in enumerate(inspection.maps):
        words = tokens[item] if item < len(tokens) else []
        texts: dict[str, Sequence[str]] = {"text": words} if words else {}

        def text_name(size: int, texts: dict[str, Sequence[str]] = texts, words: Sequence[str] = words) -> str:
            name = "text" if size == len(words) else f"{size} positions"
            texts.setdefault(name, [str(position) for position in range(size)])
            return name

        maps = [
            Maps(inspection.label(name), w, text_name(w.shape[1]), text_name(w.shape[2])) for name, w in layers.items()
        ]
        if maps:
            examples.append(Layered(texts, {_METHOD: maps}))
    return examples


def _diversity(space: str, inspection: Inspection, with_grids: bool) -> str:
    if space not in inspection.diversity:
        return ""
    entries = inspection.diversity[space]
    columns = ["layer", "heads", "effective heads", "mean cosine", "mean distance"]
    columns += ["cosine of tokens"] if space == "outputs" else []
    rows = ""
    for d in entries:
        cells = [str(d.num_heads), f"{d.effective_heads:.2f}", number(d.mean_cosine, 3), format_distance(d)]
        cells += [number(d.tokens, 3)] if space == "outputs" else []
        rows += f"<tr>{_row_header(inspection, d.name)}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>\n"
    head = "".join(f'<th scope="col">{name}</th>' for name in columns)
    grids = [Grid(inspection.label(d.name), d.cosine.cpu(), MEASURE) for d in entries if d.num_heads > 1]
    table = scrolling_table(f"Diversity of {space}, layer by layer", head, rows)
    return f"<p>{_DIVERSITY[space]}</p>\n{table}{grid_rows(grids if with_grids else [])}"


def _closest_pairs(inspection: Inspection) -> str:
    rows = "".join(
        f"<tr>{_row_header(inspection, pair.name)}<td>{space}</td><td>{pair.first} and {pair.second}</td>"
        f"<td>{number(pair.cosine, 3)}</td></tr>\n"
        for space in _SPACES
        for pair in inspection.closest(space)
    )
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{name}</th>' for name in ("layer", "compared by", "heads", "cosine"))
    return scrolling_table("Pairs with the largest cosines of weights, attention and outputs", head, rows)


def _redundancy(inspection: Inspection) -> str:
    page = ""
    if inspection.importance is not None:
        page += _heads(inspection, inspection.importance, "First-order importance, l2-normalised per layer")
    if inspection.ablation is not None:
        change = inspection.ablation.change
        page += _heads(inspection, change, f"Exact ablation of one head: {inspection.metric}")
        charts = redundancy_charts({"All heads": change}, "change of the output")
        if inspection.pruned is not None:
            name = "Least important heads first"
            charts.append(replace(pruning_chart({name: [inspection.pruned]}, name), y_name="change of the output"))
        page += charts_with_legend(charts, [chart.name for chart in charts])
    return page


def _heads(inspection: Inspection, scores: Tensor, caption: str) -> str:
    rows = [inspection.label(name) for name, *_ in inspection.layers]
    return head_table(HeadTable(caption, rows, scores, scores.clamp(min=0)))


def _row_header(inspection: Inspection, name: str) -> str:
    """Render the first cell of a row: the short name of a layer, and its module path in small print."""
    short = inspection.label(name)
    path = f" <small>{escaped(name)}</small>" if short != name else ""
    return f'<th scope="row">{escaped(short)}{path}</th>'


def _sizes(inspection: Inspection) -> list[tuple[str, str]]:
    """List the numbers of layers and heads, the similarity of logits and the effective heads in weights as facts."""
    facts = []
    if inspection.layers:
        facts.append(("Attention layers", str(len(inspection.layers))))
        facts.append(("Heads", str(sum(heads for *_, heads in inspection.layers))))
    with_pairs = [each for each in inspection.circuits.logits if each.similarity.num_heads > 1]
    if with_pairs:
        own = statistics.fmean(each.similarity.mean for each in with_pairs)
        null = statistics.fmean(each.mean.mean for each in with_pairs)
        untrained = "" if math.isnan(null) else f"; untrained {number(null, 2)}"
        facts.append(("Similarity of logits", f"{number(own, 2)}, mean over layers{untrained}"))
    if weights := inspection.diversity.get("weights"):
        facts.append(("Effective heads, weights", format_effective_heads(weights)))
    return facts
