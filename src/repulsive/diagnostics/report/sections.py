"""Sections of the page: a heading, a paragraph on how to read it, grids, charts and numbers."""

from __future__ import annotations

from collections.abc import Sequence

from repulsive.diagnostics.report.chart import key, line_chart
from repulsive.diagnostics.report.maps import overlap_grid, scale
from repulsive.diagnostics.report.panels import Chart, Grid, Panel, Sheet
from repulsive.diagnostics.report.text import escaped


def panel_section(panel: Panel, methods: Sequence[str]) -> str:
    """A panel; `methods` are those of the whole page, so that a method has one colour everywhere."""
    lead = "".join(f"<p>{escaped(paragraph)}</p>\n" for paragraph in panel.lead)
    notes = "".join(f"<li>{escaped(note)}</li>" for note in panel.notes)
    listed = f'<ul class="notes">{notes}</ul>\n' if notes else ""
    sheets = "".join(sheet_table(sheet) for sheet in panel.sheets)
    body = f"{lead}{_grids(panel.grids)}{charts_with_key(panel.charts, methods)}{sheets}{listed}"
    return f"<section><h2>{escaped(panel.title)}</h2>\n{body}</section>\n"


def charts_with_key(charts: Sequence[Chart], methods: Sequence[str]) -> str:
    """Charts side by side, and once for all of them which line is which method, unless each chart is one method's."""
    if not charts:
        return ""
    shown = {series.method for chart in charts for series in chart.series}
    own = all({series.method for series in chart.series} == {chart.name} for chart in charts)
    marks = {series.mark for chart in charts for series in chart.series}
    told = "" if own else key([method for method in methods if method in shown], methods, dots="dots" in marks)
    figures = "".join(line_chart(chart, methods, small=own) for chart in charts)
    kind = "charts small" if own else "charts"
    return f'{told}<div class="{kind}">{figures}</div>\n'


def sheet_table(sheet: Sheet) -> str:
    """A plain table that scrolls by itself where the page is narrow."""
    head = "".join(f'<th scope="col">{escaped(name)}</th>' for name in sheet.columns)
    rows = ""
    for first, *cells in sheet.rows:
        rest = "".join(f"<td>{escaped(cell)}</td>" for cell in cells)
        rows += f'<tr><th scope="row">{escaped(first)}</th>{rest}</tr>\n'
    said = escaped(sheet.caption)
    return (
        f'<p class="caption of-sheet">{said}</p>\n<div class="scroll" role="region" aria-label="{said}" tabindex="0">'
        f'<table class="sheet">\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody></table></div>\n'
    )


def _grids(grids: Sequence[Grid]) -> str:
    """A row of grids for each thing that was measured."""
    page = ""
    for what in dict.fromkeys(grid.what for grid in grids):
        row = "".join(overlap_grid(grid.values, grid.method, what) for grid in grids if grid.what == what)
        page += f'<h3>{escaped(what)}</h3>\n{scale("1", "")}<div class="overlaps">{row}</div>\n'
    return page
