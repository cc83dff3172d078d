"""The attention explorer of models with layers: an example, a layer, heads, and two runs side by side."""

from __future__ import annotations

from collections.abc import Sequence

from repulsive.pages.explorer import picker
from repulsive.pages.layered import Layered, layer_names, script_data
from repulsive.pages.maps import scale
from repulsive.pages.text import escaped, script_json, shortened, visible

LEAD = (
    "A row is a token that looks, a column a token that is looked at; the stronger the colour, the more attention. "
    "Choose heads by their numbers, or click a small map to see its head alone; “mean” is the mean over all heads."
)


def layer_explorer(examples: Sequence[Layered], methods: Sequence[str], room: int) -> str:
    """The section; `layers.js` draws what is chosen in it.

    Args:
        examples: what to show, at least one.
        methods: in the order of the page.
        room: bytes it may take. An example that does not fit shows what each token receives from all together; one
            that does not fit so either is left out. The section says so.
    """
    layers, shown, smaller = layer_names(examples), [], 0
    methods = [method for method in methods if any(method in example.readings for example in examples)]
    texts: list[str] = []
    for example in examples:
        for fits in (example, example.received()):
            found = script_json(script_data(fits, layers, methods))
            if len(found) + 300 <= room:
                room -= len(found) + 300  # 300: its line in the picker
                shown.append(example)
                texts.append(found)
                smaller += fits is not example
                break
    told = _left_out(len(examples), len(shown), smaller)
    if not shown:
        return f"<section><h2>What each head reads</h2>\n{told}</section>\n"
    seen = [visible(method) for method in methods]
    data = f'{{"layers":{script_json(layers)},"methods":{script_json(seen)},"examples":[{",".join(texts)}]}}'
    return (
        f'<section id="layers"><h2>What each head reads</h2>\n<p>{escaped(LEAD)}</p>\n{told}'
        f"{_controls(shown, layers, methods)}"
        "<noscript><p>These maps are drawn by JavaScript.</p></noscript>\n"
        f'<div id="drawn" hidden>{scale("1", "attention", "top")}<div class="stage" id="stage"></div></div>\n'
        '<svg id="empty" width="0" height="0" aria-hidden="true"></svg>\n'  # tells the script what a drawing is
        f'<script type="application/json" id="attention">{data}</script></section>\n'
    )


def _controls(examples: Sequence[Layered], layers: Sequence[str], methods: Sequence[str]) -> str:
    heads = max(len(m.weights) for e in examples for each in e.readings.values() for m in each)
    chips = "".join(
        f'<label><input type="checkbox" name="heads" value="{head}"><span>{head}</span></label>'
        for head in ("mean", *range(heads))
    )
    sides = "".join(_choice(side, name, methods) for side, name in (("left", "Run"), ("right", "beside")))
    return (
        '<div class="controls" id="controls" hidden>'
        f"{picker([_summary(example, number) for number, example in enumerate(examples, 1)])}"
        f"{_choice('layer', 'Layer', layers)}{sides if len(methods) > 1 else ''}"
        f'<fieldset class="chips"><legend>Heads</legend>{chips}'
        '<button type="button" id="every">all heads</button></fieldset></div>\n'
        '<p class="readout" id="readout" hidden>Point at a cell to read its attention.</p>\n'
    )


def _choice(name: str, said: str, among: Sequence[str]) -> str:
    options = "".join(f'<option value="{place}">{escaped(each)}</option>' for place, each in enumerate(among, 1))
    return f'<div class="pick one"><label for="{name}">{said}</label> <select id="{name}">{options}</select></div>'


def _summary(example: Layered, number: int) -> str:
    tokens = next(iter(example.texts.values()))
    return f"{number} · {shortened(' '.join(visible(token) for token in tokens[:12]), 60)}"


def _left_out(given: int, shown: int, smaller: int) -> str:
    told = []
    if smaller:
        told.append(f"{smaller} of {given} examples show what each token receives from all tokens together")
    if shown < given:
        told.append(f"{given - shown} of {given} examples are left out")
    return f'<p class="warn">{", and ".join(told)}, to keep this file small.</p>\n' if told else ""
