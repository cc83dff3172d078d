"""Attention explorer for models with several layers: select an example, a layer, heads, and two methods to compare.

`layer_explorer.js` draws the selected maps from the weights that this module packs into the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from repulsive.pages.data.layers import Layered, Maps, layer_names
from repulsive.pages.html.example_explorer import HEADING, picker
from repulsive.pages.html.heat_map import scale
from repulsive.pages.text import escaped, script_json, shortened, visible

ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"  # the same as in `attention_map.js`
STEPS = len(ALPHABET) ** 2 - 1  # resolution of a packed weight between 0 and 1
LEAD = (
    "Each row is a query token, each column a key token; stronger colours mean more attention. Select heads by number, "
    "or click a small map to show its head alone. “mean” is the mean over all heads."
)
_OPTION_BYTES = 300  # size of an example's line in the list of examples


def layer_explorer(
    examples: Sequence[Layered], methods: Sequence[str], room: int, *, heading: str = HEADING, lead: str = ""
) -> str:
    """Render the attention explorer.

    Args:
        examples: the examples, at least one.
        methods: all methods of the page, in order.
        room: bytes available. An example that does not fit is averaged over its query tokens; if it still does not
            fit, it is left out. The section says so.
        heading: title of the section.
        lead: paragraph about the examples, plain text.
    """
    layers, shown, averaged = layer_names(examples), [], 0
    methods = [method for method in methods if any(method in example.readings for example in examples)]
    data: list[str] = []
    for example in examples:
        for candidate in (example, example.received()):
            text = script_json(script_data(candidate, layers, methods))
            if len(text) + _OPTION_BYTES <= room:
                room -= len(text) + _OPTION_BYTES
                shown.append(example)
                data.append(text)
                averaged += candidate is not example
                break
    paragraph = f"<p>{escaped(lead)}</p>\n" if lead else ""
    warning = _size_warning(len(examples), len(shown), averaged)
    if not shown:
        return f"<section><h2>{escaped(heading)}</h2>\n{paragraph}{warning}</section>\n"
    names = [visible(method) for method in methods]
    json = f'{{"layers":{script_json(layers)},"methods":{script_json(names)},"examples":[{",".join(data)}]}}'
    return (
        f'<section id="layers"><h2>{escaped(heading)}</h2>\n{paragraph}<p>{escaped(LEAD)}</p>\n{warning}'
        f"{_controls(shown, layers, methods)}"
        "<noscript><p>These maps need JavaScript.</p></noscript>\n"
        f'<div id="drawn" hidden>{scale("1", "attention", "top")}<div class="stage" id="stage"></div></div>\n'
        '<svg id="empty" width="0" height="0" aria-hidden="true"></svg>\n'  # gives the script the SVG namespace
        f'<script type="application/json" id="attention">{json}</script></section>\n'
    )


def script_data(example: Layered, layers: Sequence[str], methods: Sequence[str]) -> dict[str, Any]:
    """Collect the data of one example for the script; None if a method does not have a layer."""
    maps = []
    for method in methods:
        by_layer = {m.layer: m for m in example.readings.get(method, ())}
        maps.append([_encoded(by_layer[name]) if name in by_layer else None for name in layers])
    texts = {name: [visible(token) for token in tokens] for name, tokens in example.texts.items()}
    return {"texts": texts, "maps": maps}


def packed(weights: Tensor) -> str:
    """Encode weights as two characters each, in row-major order.

    Example:
        >>> packed(torch.tensor([0.0, 1.0]))
        'AA__'
    """
    steps = (weights.double().clamp(0, 1) * STEPS).round().long().flatten()  # [N]
    letters = torch.tensor(list(ALPHABET), dtype=torch.uint8)
    pairs = torch.stack([letters[steps // len(ALPHABET)], letters[steps % len(ALPHABET)]], -1)  # [N, 2]
    return bytes(pairs.flatten().tolist()).decode()


def _encoded(maps: Maps) -> dict[str, Any]:
    return {"heads": len(maps.weights), "rows": maps.rows, "columns": maps.columns, "weights": packed(maps.weights)}


def _controls(examples: Sequence[Layered], layers: Sequence[str], methods: Sequence[str]) -> str:
    heads = max(len(m.weights) for e in examples for layer_maps in e.readings.values() for m in layer_maps)
    chips = "".join(
        f'<label><input type="checkbox" name="heads" value="{head}"><span>{head}</span></label>'
        for head in ("mean", *range(heads))
    )
    sides = "".join(_menu(side, label, methods) for side, label in (("left", "Left"), ("right", "Right")))
    return (
        '<div class="controls" id="controls" hidden>'
        f"{picker([_summary(example, number) for number, example in enumerate(examples, 1)])}"
        f"{_menu('layer', 'Layer', layers)}{sides if len(methods) > 1 else ''}"
        f'<fieldset class="chips"><legend>Heads</legend>{chips}'
        '<button type="button" id="every">all heads</button></fieldset></div>\n'
        '<p class="readout" id="readout" hidden>Point at a cell to see its attention.</p>\n'
    )


def _menu(name: str, label: str, choices: Sequence[str]) -> str:
    options = "".join(f'<option value="{index}">{escaped(choice)}</option>' for index, choice in enumerate(choices, 1))
    return f'<div class="pick one"><label for="{name}">{label}</label> <select id="{name}">{options}</select></div>'


def _summary(example: Layered, number: int) -> str:
    tokens = next(iter(example.texts.values()))
    return f"{number} · {shortened(' '.join(visible(token) for token in tokens[:12]), 60)}"


def _size_warning(total: int, shown: int, averaged: int) -> str:
    parts = []
    if averaged:
        parts.append(f"{averaged} of {total} examples show the mean over query tokens only")
    if shown < total:
        parts.append(f"{total - shown} of {total} examples are left out")
    return f'<p class="warn">{", and ".join(parts)}, to keep this file small.</p>\n' if parts else ""
