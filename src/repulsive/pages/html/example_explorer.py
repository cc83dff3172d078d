"""Attention explorer for models with one attention layer: words coloured by attention, methods side by side.

`example_explorer.js` selects what is visible; without JavaScript each example can be unfolded and read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from repulsive.pages.data.report import Content, Example, Reading
from repulsive.pages.html.head_maps import head_maps, peak_summary
from repulsive.pages.html.heat_map import aspect_class, levels, scale
from repulsive.pages.text import escaped, script_json, shortened, visible

HEADING = "Attention explorer"


def example_explorer(content: Content, room: int) -> str:
    """Render the explorer of all examples that fit.

    Args:
        content: the content of the page.
        room: bytes available. Examples that do not fit are left out, and the section says how many.
    """
    if not content.examples:
        empty = f"<section><h2>{HEADING}</h2>\n<p>This report has no examples.</p></section>\n"
        return "" if content.panels else empty
    sections: list[str] = []
    for number, example in enumerate(content.examples, 1):
        section = example_section(example, number, content.threshold)
        line = len(escaped(summary(example, number)).encode()) + 40  # in the list of examples
        room -= len(section.encode()) + line + len(script_json(script_data([example]))) + 1
        if room < 0:
            break
        sections.append(section)
    shown, total = len(sections), len(content.examples)
    left_out = ""
    if shown < total:
        left_out = f'<p class="warn">{total - shown} of {total} examples are left out to keep this file small.</p>\n'
    if not shown:
        return f"<section><h2>{HEADING}</h2>\n{left_out}</section>\n"
    data = script_json(script_data(content.examples[:shown]))
    return (
        f'<section id="explorer"><h2>{HEADING}</h2>\n{left_out}{controls(content, shown)}'
        "<noscript><p>Without JavaScript: unfold an example to see its words and the map of all heads.</p></noscript>\n"
        f'{"".join(sections)}<script type="application/json" id="attention">{data}</script></section>\n'
    )


def example_section(example: Example, number: int, threshold: float) -> str:
    """Render one example in full, so that it can be read without JavaScript."""
    aspects = aspect_numbers(example)
    overall = [reading.weights().mean(0) for reading in example.readings]  # [T] each
    top = max(float(weights.max()) for weights in overall)
    top_head = max(float(reading.weights().max()) for reading in example.readings)
    cards = "".join(_card(example, index, weights, top, aspects) for index, weights in enumerate(overall))
    opened, line = " open" if number == 1 else "", escaped(summary(example, number))
    return (
        f'<details class="example" id="example-{number}"{opened}><summary>{line}</summary>\n'
        f'<p class="truth">True class: <b>{escaped(example.label)}</b></p>\n'
        f"{evidence_table(example, threshold)}"
        f'<div class="of-overall">{scale(f"{top:.3f}", "attention, mean over heads")}</div>'
        f'<div class="of-head">{scale(f"{top_head:.3f}", "attention of one head")}</div>'
        f'<div class="cards">{cards}</div>\n{head_maps(example, aspects)}</details>\n'
    )


def evidence_table(example: Example, threshold: float) -> str:
    """Render a table of aspects: the evidence words, and for each method the head that attends to them most."""
    if not example.evidence:
        return ""
    names = "".join(f'<th scope="col">{escaped(reading.method)}</th>' for reading in example.readings)
    rows = ""
    for number, (aspect, positions) in enumerate(example.evidence.items(), 1):
        if not positions:
            continue  # the coverage metric ignores aspects without words, too
        words = " ".join(visible(example.tokens[position]) for position in positions)
        marks = "".join(_coverage(reading, positions, threshold) for reading in example.readings)
        rows += (
            f'<tr><th scope="row"><span class="e {aspect_class(number)}" data-a="{number}">{escaped(aspect)}</span> '
            f"<small>{escaped(shortened(words, 60))}</small></th>{marks}</tr>"
        )
    return (
        '<p class="caption">Evidence coverage. An aspect is covered if at least one head gives its evidence words '
        f"{threshold:g} or more of its attention. The numbers are the attention of the best head.</p>"
        '<div class="scroll" role="region" aria-label="Evidence" tabindex="0"><table class="evidence">'
        f'<thead><tr><th scope="col">Aspect</th>{names}</tr></thead><tbody>{rows}</tbody></table></div>\n'
    )


def aspect_numbers(example: Example) -> dict[int, int]:
    """Map each evidence position to the number of its aspect, from 1; the first aspect wins."""
    numbers: dict[int, int] = {}
    for number, positions in enumerate(example.evidence.values(), 1):
        for position in positions:
            numbers.setdefault(position, number)
    return dict(sorted(numbers.items()))


def summary(example: Example, number: int) -> str:
    """Summarise an example in one line: number, class and first words."""
    start = shortened(" ".join(visible(token) for token in example.tokens[:12]), 60)
    return f"{number} · {example.label} · {start}"


def picker(summaries: Sequence[str]) -> str:
    """Render a list to select an example, with buttons for the previous and the next one; hidden if there is one."""
    options = "".join(f'<option value="{index}">{escaped(name)}</option>' for index, name in enumerate(summaries, 1))
    hidden = " hidden" if len(summaries) == 1 else ""
    return (
        f'<div class="pick"{hidden}><label for="pick">Example</label> <button type="button" id="previous" '
        f'aria-label="Previous example">‹</button><select id="pick">{options}</select>'
        '<button type="button" id="next" aria-label="Next example">›</button></div>'
    )


def controls(content: Content, shown: int) -> str:
    """Render the controls, hidden until the script runs."""
    summaries = [summary(example, number) for number, example in enumerate(content.examples[:shown], 1)]
    heads = max(len(reading.attention) for reading in content.examples[0].readings)
    views = "".join(
        f'<label><input type="radio" name="view" value="{view}"><span>{name}</span></label>'
        for view, name in (("overall", "Mean over heads"), ("heads", "All heads"), ("head", "One head"))
    )
    return (
        '<div class="controls" id="controls" hidden>'
        f'{picker(summaries)}<fieldset class="views"><legend>Show</legend>{views}</fieldset>'
        f"{_method_filter([reading.method for reading in content.examples[0].readings])}"
        f'<div class="choose" id="choose"><label for="head">Head</label> <input type="range" id="head" min="0" '
        f'max="{heads - 1}" value="0"> <output id="chosen" for="head">0</output></div></div>\n'
        '<p class="readout" id="readout" hidden>Point at a cell or a word to see its attention. Click a cell to show '
        "its head.</p>\n"
    )


def _method_filter(methods: Sequence[str]) -> str:
    """Render check boxes to hide methods, if there are more than two."""
    if len(methods) < 3:
        return ""
    chips = "".join(
        f'<label><input type="checkbox" name="runs" value="{index}"><span>{escaped(method)}</span></label>'
        for index, method in enumerate(methods, 1)
    )
    return f'<fieldset class="chips"><legend>Methods</legend>{chips}</fieldset>'


def script_data(examples: Sequence[Example]) -> list[dict[str, Any]]:
    """Collect the weights for the script, in thousandths; the words are already in the page."""
    return [
        {
            "top": round(max(float(reading.weights().max()) for reading in example.readings), 6),
            "maps": [(reading.weights() * 1000).round().long().tolist() for reading in example.readings],
        }
        for example in examples
    ]


def _card(example: Example, index: int, overall: Tensor, top: float, aspects: dict[int, int]) -> str:
    reading = example.readings[index]
    correct = reading.predicted == example.label
    mark = '<span class="better">✓ correct</span>' if correct else '<span class="worse">✗ wrong</span>'
    steps = levels(overall, top).tolist()
    words = " ".join(_word(token, steps[at], aspects.get(at)) for at, token in enumerate(example.tokens))
    return (
        f'<article class="card" data-run="{index + 1}"><h3>{escaped(reading.method)}</h3>'
        f'<p class="prediction">predicts <b>{escaped(reading.predicted)}</b> ({reading.probability:.2f}) {mark}'
        f'<span class="peaks">{peak_summary(reading)}</span></p><p class="words">{words}</p></article>\n'
    )


def _word(token: str, step: int, aspect: int | None) -> str:
    if aspect is None:
        return f'<span class="w h{step}">{escaped(token)}</span>'
    return f'<span class="w h{step} e {aspect_class(aspect)}" data-a="{aspect}">{escaped(token)}</span>'


def _coverage(reading: Reading, positions: Sequence[int], threshold: float) -> str:
    attention = reading.weights()[:, sorted(set(positions))].sum(-1)  # [M]
    head = int(attention.argmax())
    best = float(attention[head])
    if best >= threshold:
        return f'<td><span class="better">✓ covered</span> <small>{best:.2f}, head {head}</small></td>'
    return f'<td><span class="worse">✗ not covered</span> <small>{best:.2f}</small></td>'
