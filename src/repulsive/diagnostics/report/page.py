"""The page: parts put together, locked by a content security policy, written aside and renamed."""

from __future__ import annotations

import base64
import hashlib
import os
from importlib.resources import files
from pathlib import Path

from repulsive.diagnostics.report.chart import key, line_chart
from repulsive.diagnostics.report.content import Content
from repulsive.diagnostics.report.explorer import controls, example_section, script_data, summary
from repulsive.diagnostics.report.maps import mean_overlap, overlap_grid, scale
from repulsive.diagnostics.report.results import results_table
from repulsive.diagnostics.report.text import escaped, script_json

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
    path = Path(path)
    page = render_page(content, most_bytes=most_bytes)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        aside.write_text(page, encoding="utf-8", newline="\n")
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return path


def render_page(content: Content, *, most_bytes: int = MOST_BYTES) -> str:
    """The page as a string: one HTML document that asks for nothing outside of itself."""
    style, script = _asset("page.css"), _asset("page.js")
    before = _header(content) + _results(content) + _curves(content) + _overlaps(content)
    room = most_bytes - sum(len(part.encode()) for part in (style, script, before)) - 10_000  # the frame around them
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f"<title>{escaped(content.title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"{before}{_explorer(content, room)}</main>\n<script>{script}</script>\n</body>\n</html>\n"
    )


def _header(content: Content) -> str:
    lead = f'<p class="lead">{escaped(content.lead)}</p>\n' if content.lead else ""
    facts = ""
    for name, value in content.facts:
        room = ' class="wide"' if len(value) > 28 else ""
        facts += f"<div{room}><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>"
    listed = f'<dl class="facts">{facts}</dl>\n' if facts else ""
    return f"<header>\n<h1>{escaped(content.title)}</h1>\n{lead}{listed}</header>\n<main>\n"


def _results(content: Content) -> str:
    return f"<section><h2>Results</h2>\n{results_table(content.table)}</section>\n" if content.table else ""


def _curves(content: Content) -> str:
    if not content.charts:
        return ""
    drawn = {series.method for chart in content.charts for series in chart.series}
    methods = [method for method in content.methods() if method in drawn]
    charts = "".join(line_chart(chart, methods) for chart in content.charts)
    return f'<section><h2>Learning curves</h2>\n{key(methods)}<div class="charts">{charts}</div></section>\n'


def _overlaps(content: Content) -> str:
    if not content.examples:
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
        return "<section><h2>What each head reads</h2>\n<p>This report was given no examples.</p></section>\n"
    sections: list[str] = []
    for number, example in enumerate(content.examples, 1):
        section = example_section(example, number, content.threshold)
        line = len(summary(example, number).encode()) + 40  # in the picker
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


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
