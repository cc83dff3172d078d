"""The attention explorer: examples, methods side by side, words coloured by attention, evidence underlined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from repulsive.pages.content import Content, Example, Reading
from repulsive.pages.heads import head_maps, top_words
from repulsive.pages.maps import aspect_class, levels, scale
from repulsive.pages.text import escaped, shortened, visible


def example_section(example: Example, number: int, threshold: float) -> str:
    """One example, whole: readable without JavaScript, which only chooses what of it is shown."""
    aspects = aspect_numbers(example)
    overall = [reading.weights().mean(0) for reading in example.readings]  # [T] each
    top = max(float(weights.max()) for weights in overall)
    top_head = max(float(reading.weights().max()) for reading in example.readings)
    cards = "".join(_card(example, place, weights, top, aspects) for place, weights in enumerate(overall))
    opened, named = " open" if number == 1 else "", escaped(summary(example, number))
    return (
        f'<details class="example" id="example-{number}"{opened}><summary>{named}</summary>\n'
        f'<p class="truth">True class: <b>{escaped(example.label)}</b></p>\n'
        f"{evidence_table(example, threshold)}"
        f'<div class="of-overall">{scale(f"{top:.3f}", "overall attention: the mean over heads")}</div>'
        f'<div class="of-head">{scale(f"{top_head:.3f}", "attention of a head")}</div>'
        f'<div class="cards">{cards}</div>\n{head_maps(example, aspects)}</details>\n'
    )


def evidence_table(example: Example, threshold: float) -> str:
    """For each aspect its words, and for each method the head that covers it best."""
    if not example.evidence:
        return ""
    names = "".join(f'<th scope="col">{escaped(reading.method)}</th>' for reading in example.readings)
    rows = ""
    for number, (aspect, places) in enumerate(example.evidence.items(), 1):
        if not places:
            continue  # as the metric has it: an aspect without a word does not count
        words = " ".join(visible(example.tokens[place]) for place in places)
        marks = "".join(_coverage(reading, places, threshold) for reading in example.readings)
        rows += (
            f'<tr><th scope="row"><span class="e {aspect_class(number)}" data-a="{number}">{escaped(aspect)}</span> '
            f"<small>{escaped(shortened(words, 60))}</small></th>{marks}</tr>"
        )
    return (
        '<p class="caption">Evidence, and whether some head covers it, that is, gives it at least '
        f"{threshold:g} of its attention. The numbers are those of the best head.</p>"
        '<div class="scroll" role="region" aria-label="Evidence" tabindex="0"><table class="evidence">'
        f'<thead><tr><th scope="col">Aspect</th>{names}</tr></thead><tbody>{rows}</tbody></table></div>\n'
    )


def aspect_numbers(example: Example) -> dict[int, int]:
    """Number of the aspect, from 1, of each position that is evidence; of several aspects the first has it."""
    found: dict[int, int] = {}
    for number, places in enumerate(example.evidence.values(), 1):
        for place in places:
            found.setdefault(place, number)
    return dict(sorted(found.items()))


def summary(example: Example, number: int) -> str:
    """An example in a line: its number, class and first words."""
    start = shortened(" ".join(visible(token) for token in example.tokens[:12]), 60)
    return f"{number} · {example.label} · {start}"


def picker(examples: Sequence[str]) -> str:
    """One example of several, by name or one after the other."""
    options = "".join(f'<option value="{place}">{escaped(name)}</option>' for place, name in enumerate(examples, 1))
    return (
        '<div class="pick"><label for="pick">Example</label> <button type="button" id="previous" '
        f'aria-label="Previous example">‹</button><select id="pick">{options}</select>'
        '<button type="button" id="next" aria-label="Next example">›</button></div>'
    )


def controls(content: Content, shown: int) -> str:
    """What the reader chooses with; hidden until the script is there to serve it."""
    names = [summary(example, number) for number, example in enumerate(content.examples[:shown], 1)]
    most = max(len(reading.attention) for reading in content.examples[0].readings)
    views = "".join(
        f'<label><input type="radio" name="view" value="{view}"><span>{name}</span></label>'
        for view, name in (("overall", "Overall"), ("heads", "All heads"), ("head", "One head"))
    )
    return (
        '<div class="controls" id="controls" hidden>'
        f'{picker(names)}<fieldset class="views"><legend>Show</legend>{views}</fieldset>'
        f"{_runs([reading.method for reading in content.examples[0].readings])}"
        f'<div class="choose" id="choose"><label for="head">Head</label> <input type="range" id="head" min="1" '
        f'max="{most}" value="1"> <output id="chosen" for="head">1</output></div></div>\n'
        '<p class="readout" id="readout" hidden>Point at a cell or a word to read its attention; click a cell to see '
        "its head.</p>\n"
    )


def _runs(methods: Sequence[str]) -> str:
    """Which methods to compare, where there are more than two."""
    if len(methods) < 3:
        return ""
    chips = "".join(
        f'<label><input type="checkbox" name="runs" value="{place}"><span>{escaped(method)}</span></label>'
        for place, method in enumerate(methods, 1)
    )
    return f'<fieldset class="chips"><legend>Runs</legend>{chips}</fieldset>'


def script_data(examples: Sequence[Example]) -> list[dict[str, Any]]:
    """What the script needs: numbers alone, weights in thousandths; it takes words from the page."""
    return [
        {
            "top": round(max(float(reading.weights().max()) for reading in example.readings), 6),
            "maps": [(reading.weights() * 1000).round().long().tolist() for reading in example.readings],
        }
        for example in examples
    ]


def _card(example: Example, place: int, overall: Tensor, top: float, aspects: dict[int, int]) -> str:
    reading = example.readings[place]
    right = reading.predicted == example.label
    mark = '<span class="better">✓ right</span>' if right else '<span class="worse">✗ wrong</span>'
    steps = levels(overall, top).tolist()
    words = " ".join(_word(token, steps[at], aspects.get(at)) for at, token in enumerate(example.tokens))
    return (
        f'<article class="card" data-run="{place + 1}"><h3>{escaped(reading.method)}</h3>'
        f'<p class="said">says <b>{escaped(reading.predicted)}</b> ({reading.probability:.2f}) {mark}'
        f'<span class="peaks">{top_words(reading)}</span></p><p class="words">{words}</p></article>\n'
    )


def _word(token: str, step: int, aspect: int | None) -> str:
    if aspect is None:
        return f'<span class="w h{step}">{escaped(token)}</span>'
    return f'<span class="w h{step} e {aspect_class(aspect)}" data-a="{aspect}">{escaped(token)}</span>'


def _coverage(reading: Reading, places: Sequence[int], threshold: float) -> str:
    given = reading.weights()[:, sorted(set(places))].sum(-1)  # [M]
    head = int(given.argmax())
    best = float(given[head])
    if best >= threshold:
        return f'<td><span class="better">✓ covered</span> <small>{best:.2f}, head {head + 1}</small></td>'
    return f'<td><span class="worse">✗ missed</span> <small>{best:.2f}</small></td>'
