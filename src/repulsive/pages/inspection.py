"""The page of an inspection: how diverse each layer's heads are, which are alike, which could go, what they look at."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from repulsive.diagnostics.inspection import Inspection
from repulsive.diagnostics.similarity import Diversity
from repulsive.diagnostics.summary import format_distance
from repulsive.pages.circuits import similarity_sections
from repulsive.pages.figures import pruning_chart, redundancy_charts
from repulsive.pages.frame import asset, document, header, write_whole
from repulsive.pages.layer_explorer import layer_explorer
from repulsive.pages.layered import Layered, Maps
from repulsive.pages.page import MOST_BYTES
from repulsive.pages.panels import Grid, HeadTable
from repulsive.pages.sections import charts_with_key, grid_rows, head_table, scrolling_table
from repulsive.pages.text import escaped, number

_SPACES = {
    "weights": "the weights of their projections",
    "attention": "what they look at",
    "outputs": "what leaves them",
}
_TOKENS = (
    "The cosine of tokens is that of two tokens of one input in what leaves all heads together. Near 1 the layers "
    "above cannot tell tokens apart: the model is untrained, or it has collapsed."
)
_MODEL = "model"  # the one method of this page


def write_inspection(
    path: str | Path,
    found: Inspection,
    *,
    title: str,
    facts: Sequence[tuple[str, str]] = (),
    tokens: Sequence[Sequence[str]] = (),
    most_bytes: int = MOST_BYTES,
) -> Path:
    """Write the page of an inspection, one HTML file that asks for nothing outside of itself.

    Args:
        path: the HTML file; its folder is made.
        found: what `inspect_heads` returned.
        title: of the page.
        facts: (name, value) pairs at its top.
        tokens: the words of the inputs in `found.maps`; none: their places are numbered.
        most_bytes: maps that would make the page larger are made smaller or left out, and the page says so.
    """
    return write_whole(path, render_inspection(found, title=title, facts=facts, tokens=tokens, most_bytes=most_bytes))


def render_inspection(
    found: Inspection,
    *,
    title: str,
    facts: Sequence[tuple[str, str]] = (),
    tokens: Sequence[Sequence[str]] = (),
    most_bytes: int = MOST_BYTES,
) -> str:
    """The page as a string; arguments as in `write_inspection`."""
    lead = (
        "Effective heads run from 1 (all alike) to the number of heads (none like another). Layers and heads are "
        "counted from 0."
    )
    body = similarity_sections(found, _layer) + _redundancy(found) + _pairs(found)
    body += "".join(_space(space, found) for space in _SPACES)
    notes = "".join(f"<li>{escaped(note)}</li>" for note in found.notes)
    body += f'<section><h2>Not measured</h2>\n<ul class="notes">{notes}</ul></section>\n' if notes else ""
    before, script = header(title, lead, [*facts, *_sizes(found)]) + body, asset("layers.js")
    examples = layered_examples(found, tokens)
    room = most_bytes - sum(len(part.encode()) for part in (asset("page.css"), script, before)) - 10_000  # the frame
    explorer = layer_explorer(examples, [_MODEL], room) if examples else ""
    return document(title, before + explorer, script=script if examples else "")


def layered_examples(found: Inspection, tokens: Sequence[Sequence[str]]) -> list[Layered]:
    """The maps of an inspection with the words they are over; positions that have none are numbered."""
    examples = []
    for item, layers in enumerate(found.maps):
        words = tokens[item] if item < len(tokens) else []
        texts: dict[str, Sequence[str]] = {"text": words} if words else {}

        def text(size: int, texts: dict[str, Sequence[str]] = texts, words: Sequence[str] = words) -> str:
            name = "text" if size == len(words) else f"{size} positions"
            texts.setdefault(name, [str(place) for place in range(size)])
            return name

        maps = [Maps(found.label(name), w, text(w.shape[1]), text(w.shape[2])) for name, w in layers.items()]
        if maps:
            examples.append(Layered(texts, {_MODEL: maps}))
    return examples


def _space(space: str, found: Inspection) -> str:
    if space not in found.diversity:
        return ""
    entries = found.diversity[space]
    more = ["cosine of tokens"] if space == "outputs" else []

    def tokens(found: Diversity) -> str:
        return f"<td>{number(found.tokens, 3)}</td>" if more else ""

    rows = "".join(
        f"<tr>{_layer(found, d.name)}<td>{d.num_heads}</td><td>{d.effective_heads:.2f}</td>"
        f"<td>{number(d.mean_cosine, 3)}</td><td>{format_distance(d)}</td>{tokens(d)}</tr>\n"
        for d in entries
    )
    names = ["layer", "heads", "effective heads", "mean cosine", "mean distance", *more]
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    what = "cosine of two heads; opposite heads are drawn as unlike"
    grids = [Grid(found.label(d.name), d.cosine.cpu(), what) for d in entries if d.num_heads > 1]
    table = scrolling_table(f"Diversity of {space}", head, rows)
    told = f"<p>{_TOKENS}</p>\n" if more else ""
    return f"<section><h2>How alike heads are in {_SPACES[space]}</h2>\n{told}{table}{grid_rows(grids)}</section>\n"


def _pairs(found: Inspection) -> str:
    rows = "".join(
        f"<tr>{_layer(found, pair.name)}<td>{space}</td><td>{pair.first} and {pair.second}</td>"
        f"<td>{number(pair.cosine, 3)}</td></tr>\n"
        for space in _SPACES
        for pair in found.closest(space)
    )
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{name}</th>' for name in ("layer", "space", "heads", "cosine"))
    table = scrolling_table("The largest cosines in each space", head, rows)
    return f"<section><h2>Most similar pairs</h2>\n{table}</section>\n"


def _redundancy(found: Inspection) -> str:
    page = ""
    if found.importance is not None:
        page += _heads(found, found.importance, "First-order importance, l2-normalised per layer")
    if found.ablation is not None:
        change = found.ablation.change
        page += _heads(found, change, f"Exact ablation of one head: {found.metric}")
        charts = redundancy_charts({"All heads": change}, "change of the output")
        if found.pruned is not None:
            name = "Least important heads first"
            charts.append(replace(pruning_chart({name: [found.pruned]}, name), y_name="change of the output"))
        page += charts_with_key(charts, [chart.name for chart in charts])
    return f"<section><h2>Which heads could go</h2>\n{page}</section>\n" if page else ""


def _heads(found: Inspection, scores: Tensor, what: str) -> str:
    rows = [found.label(name) for name, *_ in found.layers]
    return head_table(HeadTable(what, rows, scores, scores.clamp(min=0)))


def _layer(found: Inspection, name: str) -> str:
    """The first cell of a row: a layer's short name, and where in the model it is."""
    short = found.label(name)
    dotted = f" <small>{escaped(name)}</small>" if short != name else ""
    return f'<th scope="row">{escaped(short)}{dotted}</th>'


def _sizes(found: Inspection) -> list[tuple[str, str]]:
    """How many heads there are, and how many in effect."""
    sizes = [("Attention layers", str(len(found.layers))), ("Heads", str(sum(heads for *_, heads in found.layers)))]
    sizes = sizes if found.layers else []
    known = [each for each in found.circuits.logits if each.similarity.num_heads > 1]
    if known:
        own = statistics.fmean(each.similarity.mean for each in known)
        null = statistics.fmean(each.mean.mean for each in known)
        untrained = "" if math.isnan(null) else f"; untrained {number(null, 2)}"
        sizes.append(("Similarity of logits", f"{number(own, 2)}, mean over layers{untrained}"))
    for space, entries in found.diversity.items():
        mean, most = statistics.fmean(d.effective_heads for d in entries), max(d.num_heads for d in entries)
        sizes.append((f"Effective heads, {space}", f"{mean:.1f} of {most}, mean over layers"))
    return sizes
