"""Results table as HTML: means, standard deviations, and paired differences from the baseline."""

from __future__ import annotations

import math

from repulsive.pages.data.report import Cell, Metric, Row, Table
from repulsive.pages.text import escaped, mean_and_sd, number, p_value

_ARROWS = {"higher": "↑", "lower": "↓"}
_STAR = '<span class="star" role="img" aria-label="best, and significantly better than the baseline">★</span>'
_SIGNS = {  # verdict, which is also the CSS class -> symbol, text for screen readers
    "better": ("▲", "significantly better"),
    "worse": ("▼", "significantly worse"),
    "unclear": ("○", "no significant difference"),
}


def verdict(cell: Cell | None, metric: Metric, level: float) -> str | None:
    """Compare a cell with the baseline: "better", "worse" or "unclear"; None if it was not compared.

    A difference is significant if its confidence interval excludes zero and its p-value is at most `level`. With few
    seeds the interval alone excludes zero too easily.
    """
    if cell is None or cell.paired is None or metric.better == "neither":
        return None
    c = cell.paired
    if not (c.low > 0 or c.high < 0) or c.p_value > level:
        return "unclear"
    return "better" if (c.difference > 0) == (metric.better == "higher") else "worse"


def best_rows(table: Table, column: int) -> set[int]:
    """Find the rows with the best mean of a column that are also significantly better than the baseline."""
    metric = table.metrics[column]
    cells = [row.cells[column] for row in table.rows]
    means = [cell.mean for cell in cells if cell is not None and math.isfinite(cell.mean)]
    if not means or metric.better == "neither":
        return set()
    best = max(means) if metric.better == "higher" else min(means)
    return {
        index
        for index, cell in enumerate(cells)
        if cell is not None and cell.mean == best and verdict(cell, metric, table.level) == "better"
    }


def results_table(table: Table) -> str:
    """Render the table with its caption, legend, notes and the meaning of its columns."""
    best = [best_rows(table, column) for column in range(len(table.metrics))]
    head = "".join(f'<th scope="col">{_column_name(metric)}</th>' for metric in table.metrics)
    body = ""
    for index, row in enumerate(table.rows):
        cells = "".join(
            _cell(cell, metric, index in winners, table.level)
            for cell, metric, winners in zip(row.cells, table.metrics, best, strict=True)
        )
        start = '<tr class="control">' if row.control else "<tr>"
        body += f"{start}{_row_name(row, table.baseline)}{cells}</tr>\n"
    notes = "".join(f"<li>{escaped(note)}</li>" for note in table.notes)
    return (
        f'<p class="caption" id="results-caption">{escaped(table.caption)}</p>\n'
        '<div class="scroll" role="region" aria-label="Table of results" tabindex="0">'
        '<table class="results" aria-describedby="results-caption">\n'
        f'<thead><tr><th scope="col">Method</th>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n'
        + _legend(table)
        + (f'<h3>Notes</h3>\n<ul class="notes">{notes}</ul>\n' if notes else "")
        + _meanings(table)
    )


def _column_name(metric: Metric) -> str:
    unit = " (%)" if metric.percent else ""
    arrow = _ARROWS.get(metric.better)
    shown = f' <span class="arrow" role="img" aria-label="{metric.better} is better">{arrow}</span>' if arrow else ""
    return f"{escaped(metric.name)}{unit}{shown}"


def _row_name(row: Row, baseline: str) -> str:
    role = "baseline" if row.method == baseline else "control" if row.control else ""
    shown = f" <small>{role}</small>" if role else ""
    return f'<th scope="row">{escaped(row.method)}{shown}</th>'


def _cell(cell: Cell | None, metric: Metric, best: bool, level: float) -> str:
    if cell is None:
        return '<td><span class="missing" role="img" aria-label="not measured">–</span></td>'
    shown = mean_and_sd(cell.mean, cell.sd, metric.digits, percent=metric.percent)
    if best:
        shown = f"<b>{shown}</b> {_STAR}"
    return f"<td>{shown}{_difference(cell, metric, level)}</td>"


def _difference(cell: Cell, metric: Metric, level: float) -> str:
    if cell.paired is None:
        return ""
    c, result = cell.paired, verdict(cell, metric, level)
    parts = [number(x, metric.digits, percent=metric.percent, signed=True) for x in (c.difference, c.low, c.high)]
    sign = ""
    if result is not None:
        symbol, label = _SIGNS[result]
        sign = f'<span class="{result}" role="img" aria-label="{label}">{symbol}</span> '
    lines = (f"{sign}{parts[0]}", f"[{parts[1]}, {parts[2]}]", escaped(p_value(c.p_value)))
    return "".join(f"<small>{line}</small>" for line in lines)


def _legend(table: Table) -> str:
    cells = [cell for row in table.rows for cell in row.cells if cell is not None]
    sentences = ["Mean ± standard deviation over seeds." if any(c.sd is not None for c in cells) else "One seed."]
    if any(cell.paired for cell in cells):
        sentences += [
            f"Small print: paired difference from {table.baseline}, its confidence interval and p-value.",
            f"▲ significantly better, ▼ significantly worse (interval excludes zero and p ≤ {table.level:g}), "
            "○ no significant difference.",
            f"★ best mean of the column, marked only if it is significantly better than {table.baseline}.",
        ]
    else:
        sentences.append("No value is marked as best, because differences were not tested.")
    return f'<p class="key">{escaped(" ".join(sentences))}</p>\n'


def _meanings(table: Table) -> str:
    meanings = [(metric.name, metric.meaning) for metric in table.metrics if metric.meaning]
    if not meanings:
        return ""
    items = "".join(f"<dt>{escaped(name)}</dt><dd>{escaped(meaning)}</dd>" for name, meaning in meanings)
    return f'<details class="meanings"><summary>Meaning of the columns</summary><dl>{items}</dl></details>\n'
