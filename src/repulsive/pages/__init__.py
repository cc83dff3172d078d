"""Self-contained HTML pages and figures for papers.

data/               data classes: the content of a report, its sections, attention maps
charts.py           builds charts from the results of diagnostics
axes.py             limits and tick marks of charts
text.py             escapes text and formats numbers
report_page.py      the report on training runs: results, curves, similarity of heads, attention explorer
inspection_page.py  the report on the heads of one model
comparison_page.py  the heads of two versions of a model
monitor_page.py     the live page of the head monitor
card.py             a social card with the verdict and a small atlas, as SVG or PNG
sample_table.py     generated texts beside the reference text
html/               HTML and SVG fragments, style sheet, scripts
figures/            the same charts and maps as SVG and PDF files, drawn by Matplotlib
"""

from repulsive.pages.data.layers import Layered, Maps
from repulsive.pages.data.panels import Chart, Grid, HeadTable, Panel, Series, Sheet
from repulsive.pages.data.report import Cell, Content, Example, Metric, Reading, Row, Table
from repulsive.pages.report_page import render_page, write_report
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
