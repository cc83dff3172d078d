"""One self-contained HTML page: results, learning curves, how alike heads are, and what each head reads."""

from repulsive.diagnostics.report.content import Cell, Content, Example, Metric, Reading, Row, Table
from repulsive.diagnostics.report.layered import Layered, Maps
from repulsive.diagnostics.report.page import render_page, write_report
from repulsive.diagnostics.report.panels import Chart, Grid, HeadTable, Panel, Series, Sheet
from repulsive.diagnostics.report.text import mean_and_sd

__all__ = [
    "Cell",
    "Chart",
    "Content",
    "Example",
    "Grid",
    "HeadTable",
    "Layered",
    "Maps",
    "Metric",
    "Panel",
    "Reading",
    "Row",
    "Series",
    "Sheet",
    "Table",
    "mean_and_sd",
    "render_page",
    "write_report",
]
