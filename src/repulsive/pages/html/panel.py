"""Sections of a page: heading, paragraphs, grids of heads, charts and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

from repulsive.pages.data.panels import Chart, Grid, HeadTable, Panel, Sheet
from repulsive.pages.html.heat_map import LEVELS, overlap_grid, scale, signed_scale
from repulsive.pages.html.svg_chart import legend, svg_chart
from repulsive.pages.text import escaped, number

MAX_LARGE_GRIDS = 8  # more grids of one kind are drawn small
MAX_OPEN_TABLES = 2  # more tables with one value per head are folded


def panel_section(panel: Panel, methods: Sequence[str]) -> str:
    """Render a panel.

    Args:
        panel: the data.
        methods: all methods of the page, so that a method has the same colour in every chart.
    """
    lead = "".join(f"<p>{escaped(paragraph)}</p>\n" for paragraph in panel.lead)
    items = "".join(f"<li>{escaped(note)}</li>" for note in panel.notes)
    notes = f'<ul class="notes">{items}</ul>\n' if items else ""
    tables = "".join(sheet_table(sheet) for sheet in panel.sheets) + _head_tables(panel.heads)
    body = f"{lead}{grid_rows(panel.grids)}{charts_with_legend(panel.charts, methods)}{tables}{notes}"
    return f"<section><h2>{escaped(panel.title)}</h2>\n{body}</section>\n"


def charts_with_legend(charts: Sequence[Chart], methods: Sequence[str]) -> str:
    """Render charts side by side with one legend; no legend if each chart shows one method and is named after it."""
    if not charts:
        return ""
    shown = {series.method for chart in charts for series in chart.series}
    one_method_each = all({series.method for series in chart.series} == {chart.name} for chart in charts)
    marks = {series.mark for chart in charts for series in chart.series}
    in_order = [method for method in methods if method in shown]
    above = "" if one_method_each else legend(in_order, methods, dots="dots" in marks)
    figures = "".join(svg_chart(chart, methods, small=one_method_each) for chart in charts)
    kind = "charts small" if one_method_each else "charts"
    return f'{above}<div class="{kind}">{figures}</div>\n'


def sheet_table(sheet: Sheet) -> str:
    """Render a plain table."""
    head = "".join(f'<th scope="col">{escaped(name)}</th>' for name in sheet.columns)
    rows = ""
    for first, *cells in sheet.rows:
        rest = "".join(f"<td>{escaped(cell)}</td>" for cell in cells)
        rows += f'<tr><th scope="row">{escaped(first)}</th>{rest}</tr>\n'
    return scrolling_table(sheet.caption, head, rows)


def _head_tables(tables: Sequence[HeadTable]) -> str:
    """Render tables with one value per head, folded if there are many."""
    if not tables:
        return ""
    opened = " open" if len(tables) <= MAX_OPEN_TABLES else ""
    shown = "".join(head_table(table) for table in tables)
    return f'<details class="single"{opened}><summary>Values per head</summary>\n{shown}</details>\n'


def head_table(table: HeadTable) -> str:
    """Render a table with one value per head; its weight is the colour of the cell."""
    top, largest = float(table.weight.nan_to_num().max()), float(table.values.nan_to_num().abs().max())
    steps = (LEVELS * (table.weight.nan_to_num() / (top or 1)).clamp(0, 1)).round().long()  # [L, M]
    rows = ""
    for name, values, levels in zip(table.rows, table.values.tolist(), steps.tolist(), strict=True):
        cells = "".join(
            f'<td class="h{level}">{number(value, table.digits) if largest >= 0.01 else f"{value:.1e}"}</td>'
            for value, level in zip(values, levels, strict=True)
            if not math.isnan(value)
        )
        rows += f'<tr><th scope="row">{escaped(name)}</th>{cells}</tr>\n'
    heads = "".join(f'<th scope="col">{head}</th>' for head in range(table.values.shape[1]))
    return scrolling_table(table.caption, f'<th scope="col">head</th>{heads}', rows)


def grid_rows(grids: Sequence[Grid]) -> str:
    """Render grids under one heading per similarity measure; grids of layers form one row per method."""
    page = ""
    for measure in dict.fromkeys(grid.what for grid in grids):
        same = [grid for grid in grids if grid.what == measure]
        methods = dict.fromkeys(grid.method for grid in same if grid.layer)
        is_signed = any(float(grid.values.min()) < 0 for grid in same)
        page += f"<h3>{escaped(measure)}</h3>\n{signed_scale() if is_signed else scale('1', '')}"
        for method in methods:
            page += f"<h4>{escaped(method)}</h4>\n{_grids([grid for grid in same if grid.method == method], measure)}"
        page += "" if methods else _grids(same, measure)
    return page


def _grids(grids: Sequence[Grid], measure: str) -> str:
    small = len(grids) > MAX_LARGE_GRIDS or any(grid.layer for grid in grids)
    shown = "".join(overlap_grid(grid.values, grid.layer or grid.method, measure, short=small) for grid in grids)
    return f'<div class="{"overlaps many" if small else "overlaps"}">{shown}</div>\n'


def scrolling_table(caption: str, head: str, rows: str) -> str:
    """Render a table that scrolls sideways on narrow screens.

    Args:
        caption: plain text above the table.
        head: markup of the header cells.
        rows: markup of the rows.
    """
    text = escaped(caption)
    return (
        f'<p class="caption of-sheet">{text}</p>\n<div class="scroll" role="region" aria-label="{text}" tabindex="0">'
        f'<table class="sheet">\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody></table></div>\n'
    )
