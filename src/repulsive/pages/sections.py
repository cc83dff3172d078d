"""Sections of the page: a heading, a paragraph on how to read it, grids, charts and numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from repulsive.pages.chart import key, line_chart
from repulsive.pages.maps import LEVELS, overlap_grid, scale
from repulsive.pages.panels import Chart, Grid, HeadTable, Panel, Sheet
from repulsive.pages.text import escaped, number

MANY = 8  # grids of one kind; more are drawn small
OPEN = 2  # tables of single heads; more are folded away


def panel_section(panel: Panel, methods: Sequence[str]) -> str:
    """A panel; `methods` are those of the whole page, so that a method has one colour everywhere."""
    lead = "".join(f"<p>{escaped(paragraph)}</p>\n" for paragraph in panel.lead)
    notes = "".join(f"<li>{escaped(note)}</li>" for note in panel.notes)
    listed = f'<ul class="notes">{notes}</ul>\n' if notes else ""
    sheets = "".join(sheet_table(sheet) for sheet in panel.sheets)
    sheets += _head_by_head(panel.heads)
    body = f"{lead}{grid_rows(panel.grids)}{charts_with_key(panel.charts, methods)}{sheets}{listed}"
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
    """A plain table."""
    head = "".join(f'<th scope="col">{escaped(name)}</th>' for name in sheet.columns)
    rows = ""
    for first, *cells in sheet.rows:
        rest = "".join(f"<td>{escaped(cell)}</td>" for cell in cells)
        rows += f'<tr><th scope="row">{escaped(first)}</th>{rest}</tr>\n'
    return scrolling_table(sheet.caption, head, rows)


def _head_by_head(tables: Sequence[HeadTable]) -> str:
    """Numbers of single heads, folded away where they are many."""
    if not tables:
        return ""
    opened = " open" if len(tables) <= OPEN else ""
    drawn = "".join(head_table(table) for table in tables)
    return f'<details class="single"{opened}><summary>Head by head</summary>\n{drawn}</details>\n'


def head_table(table: HeadTable) -> str:
    """Rows are layers or runs, columns heads, the colour of a cell how much its head counts."""
    top, most = float(table.weight.nan_to_num().max()), float(table.values.nan_to_num().abs().max())
    steps = (LEVELS * (table.weight.nan_to_num() / (top or 1)).clamp(0, 1)).round().long()  # [L, M]
    rows = ""
    for name, values, levels in zip(table.rows, table.values.tolist(), steps.tolist(), strict=True):
        shown = "".join(
            f'<td class="h{level}">{number(value, table.digits) if most >= 0.01 else f"{value:.1e}"}</td>'
            for value, level in zip(values, levels, strict=True)
            if not math.isnan(value)
        )
        rows += f'<tr><th scope="row">{escaped(name)}</th>{shown}</tr>\n'
    heads = "".join(f'<th scope="col">{table.first + head}</th>' for head in range(table.values.shape[1]))
    return scrolling_table(table.caption, f'<th scope="col">head</th>{heads}', rows)


def grid_rows(grids: Sequence[Grid]) -> str:
    """A row of grids for each thing that was measured, where there are layers one for each method; many are small."""
    page = ""
    for what in dict.fromkeys(grid.what for grid in grids):
        row = [grid for grid in grids if grid.what == what]
        methods = dict.fromkeys(grid.method for grid in row if grid.layer)
        page += f"<h3>{escaped(what)}</h3>\n{scale('1', '')}"
        for method in methods:
            page += f"<h4>{escaped(method)}</h4>\n{_grids([grid for grid in row if grid.method == method], what)}"
        page += "" if methods else _grids(row, what)
    return page


def _grids(grids: Sequence[Grid], what: str) -> str:
    many = len(grids) > MANY or any(grid.layer for grid in grids)
    drawn = "".join(overlap_grid(grid.values, grid.layer or grid.method, what, short=many) for grid in grids)
    return f'<div class="{"overlaps many" if many else "overlaps"}">{drawn}</div>\n'


def scrolling_table(caption: str, head: str, rows: str) -> str:
    """A table of markup that scrolls by itself where the page is narrow."""
    said = escaped(caption)
    return (
        f'<p class="caption of-sheet">{said}</p>\n<div class="scroll" role="region" aria-label="{said}" tabindex="0">'
        f'<table class="sheet">\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody></table></div>\n'
    )
