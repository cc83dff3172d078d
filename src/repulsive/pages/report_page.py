"""Report on training runs: results, learning curves, similarity of heads, panels, attention explorer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from repulsive.pages.data.report import Content
from repulsive.pages.html.document import asset, document, header, write_whole
from repulsive.pages.html.example_explorer import example_explorer
from repulsive.pages.html.heat_map import mean_overlap, overlap_grid, scale
from repulsive.pages.html.layer_explorer import layer_explorer
from repulsive.pages.html.panel import charts_with_legend, panel_section
from repulsive.pages.html.results_table import results_table

MAX_BYTES = 5_000_000
FRAME_BYTES = 10_000  # generous estimate for everything that is not style, script or content


def write_report(path: str | Path, content: Content, *, max_bytes: int = MAX_BYTES) -> Path:
    """Write a report atomically as one self-contained HTML file.

    Args:
        path: the HTML file; its folder is created.
        content: the content of the report.
        max_bytes: limit of the file size. Examples that do not fit are left out, and the page says so.

    Returns:
        The path written.
    """
    return write_whole(path, render_page(content, max_bytes=max_bytes))


def render_page(content: Content, *, max_bytes: int = MAX_BYTES) -> str:
    """Render a report as a self-contained HTML document; arguments as in `write_report`."""
    script = asset("attention_map.js") + asset("layer_explorer.js") if content.layered else asset("example_explorer.js")
    methods = content.methods()
    before = header(content.title, content.lead, content.facts) + _results(content) + _curves(content, methods)
    before += _overlaps(content) + "".join(panel_section(panel, methods) for panel in content.panels)
    room = max_bytes - sum(len(part.encode()) for part in (asset("page.css"), script, before)) - FRAME_BYTES
    explorer = layer_explorer(content.layered, methods, room) if content.layered else example_explorer(content, room)
    return document(content.title, before + explorer, script=script)


def _results(content: Content) -> str:
    return f"<section><h2>Results</h2>\n{results_table(content.table)}</section>\n" if content.table else ""


def _curves(content: Content, methods: Sequence[str]) -> str:
    if not content.charts:
        return ""
    return f"<section><h2>Learning curves</h2>\n{charts_with_legend(content.charts, methods)}</section>\n"


def _overlaps(content: Content) -> str:
    if not content.examples or any(panel.grids for panel in content.panels):
        return ""
    grids = "".join(
        overlap_grid(mean_overlap(content.examples, index), reading.method)
        for index, reading in enumerate(content.examples[0].readings)
    )
    over = "the example" if len(content.examples) == 1 else f"the {len(content.examples)} examples"
    return (
        "<section><h2>Similarity of heads</h2>\n"
        f"<p>Overlap of the attention of two heads, averaged over {over} of this page. Rows and columns are heads. The "
        "overlap is 1 for heads that attend to the same words (and on the diagonal), and 0 for heads that share no "
        "words.</p>\n"
        f'{scale("1", "overlap")}<div class="overlaps">{grids}</div></section>\n'
    )
