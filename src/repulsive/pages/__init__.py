"""One self-contained HTML page: results, learning curves, how alike heads are, and what each head reads."""

from repulsive.pages.content import Cell, Content, Example, Metric, Reading, Row, Table
from repulsive.pages.layered import Layered, Maps
from repulsive.pages.page import render_page, write_report
from repulsive.pages.panels import Chart, Grid, HeadTable, Panel, Series, Sheet
from repulsive.pages.text import mean_and_sd

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
