"""The page of results: what was found, learning curves, how alike heads are, panels, and what each head reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from repulsive.pages.content import Content
from repulsive.pages.explorer import controls, example_section, script_data, summary
from repulsive.pages.frame import asset, document, header, write_whole
from repulsive.pages.layer_explorer import layer_explorer
from repulsive.pages.maps import mean_overlap, overlap_grid, scale
from repulsive.pages.results import results_table
from repulsive.pages.sections import charts_with_key, panel_section
from repulsive.pages.text import escaped, script_json

MOST_BYTES = 5_000_000


def write_report(path: str | Path, content: Content, *, most_bytes: int = MOST_BYTES) -> Path:
    """Write the page of `content`; whoever opens `path` meanwhile sees the old page or the new one, whole.

    Args:
        path: the HTML file; its folder is made.
        content: what to show.
        most_bytes: examples that would make the page larger are left out, and the page says so.

    Returns:
        The path written.
    """
    return write_whole(path, render_page(content, most_bytes=most_bytes))


def render_page(content: Content, *, most_bytes: int = MOST_BYTES) -> str:
    """The page as a string: one HTML document that asks for nothing outside of itself."""
    script, methods = asset("layers.js" if content.layered else "page.js"), content.methods()
    before = header(content.title, content.lead, content.facts) + _results(content) + _curves(content, methods)
    before += _overlaps(content) + "".join(panel_section(panel, methods) for panel in content.panels)
    room = most_bytes - sum(len(part.encode()) for part in (asset("page.css"), script, before)) - 10_000  # the frame
    explorer = layer_explorer(content.layered, methods, room) if content.layered else _explorer(content, room)
    return document(content.title, before + explorer, script=script)


def _results(content: Content) -> str:
    return f"<section><h2>Results</h2>\n{results_table(content.table)}</section>\n" if content.table else ""


def _curves(content: Content, methods: Sequence[str]) -> str:
    if not content.charts:
        return ""
    return f"<section><h2>Learning curves</h2>\n{charts_with_key(content.charts, methods)}</section>\n"


def _overlaps(content: Content) -> str:
    if not content.examples or any(panel.grids for panel in content.panels):
        return ""
    grids = "".join(
        overlap_grid(mean_overlap(content.examples, place), reading.method)
        for place, reading in enumerate(content.examples[0].readings)
    )
    over = "the example" if len(content.examples) == 1 else f"the {len(content.examples)} examples"
    return (
        "<section><h2>How alike the heads are</h2>\n"
        f"<p>Attention that two heads have in common, averaged over {over} of this page: 1 on the diagonal and for "
        "heads that read the same words, 0 for heads that share none. Rows and columns are heads.</p>\n"
        f'{scale("1", "attention in common")}<div class="overlaps">{grids}</div></section>\n'
    )


def _explorer(content: Content, room: int) -> str:
    if not content.examples:
        none = "<section><h2>What each head reads</h2>\n<p>This report was given no examples.</p></section>\n"
        return "" if content.panels else none
    sections: list[str] = []
    for number, example in enumerate(content.examples, 1):
        section = example_section(example, number, content.threshold)
        line = len(escaped(summary(example, number)).encode()) + 40  # in the picker
        room -= len(section.encode()) + line + len(script_json(script_data([example]))) + 1
        if room < 0:
            break
        sections.append(section)
    shown, given = len(sections), len(content.examples)
    left_out = ""
    if shown < given:
        left_out = f'<p class="warn">{given - shown} of {given} examples are left out to keep this file small.</p>\n'
    if not shown:
        return f"<section><h2>What each head reads</h2>\n{left_out}</section>\n"
    data = script_json(script_data(content.examples[:shown]))
    return (
        f'<section id="explorer"><h2>What each head reads</h2>\n{left_out}{controls(content, shown)}'
        "<noscript><p>Without JavaScript: open an example below; single heads are in its grid.</p></noscript>\n"
        f'{"".join(sections)}<script type="application/json" id="attention">{data}</script></section>\n'
    )
