"""The table of results: means, spreads, and what stands out against the baseline."""

from __future__ import annotations

import math

from repulsive.pages.content import Cell, Metric, Row, Table
from repulsive.pages.text import escaped, mean_and_sd, number, p_value

_ARROWS = {"higher": "↑", "lower": "↓"}
_STAR = '<span class="star" role="img" aria-label="best, and better than the baseline">★</span>'
_SIGNS = {"better": "▲", "worse": "▼", "unclear": "○"}


def verdict(cell: Cell | None, metric: Metric, level: float) -> str | None:
    """What a cell is against the baseline: "better", "worse" or "unclear"; None where there is nothing to tell.

    A difference counts when its interval is free of zero and its p-value is no larger than `level`: with few seeds an
    interval alone is too easily free of zero.
    """
    if cell is None or cell.paired is None or metric.better == "neither":
        return None
    c = cell.paired
    if not (c.low > 0 or c.high < 0) or c.p_value > level:
        return "unclear"
    return "better" if (c.difference > 0) == (metric.better == "higher") else "worse"


def best_rows(table: Table, column: int) -> set[int]:
    """Rows with the best mean of a column, of these only such as are better than the baseline by comparison."""
    metric = table.metrics[column]
    cells = [row.cells[column] for row in table.rows]
    means = [cell.mean for cell in cells if cell is not None and math.isfinite(cell.mean)]
    if not means or metric.better == "neither":
        return set()
    best = max(means) if metric.better == "higher" else min(means)
    return {
        place
        for place, cell in enumerate(cells)
        if cell is not None and cell.mean == best and verdict(cell, metric, table.level) == "better"
    }


def results_table(table: Table) -> str:
    """The table with its caption, its key, its notes and what its columns mean."""
    best = [best_rows(table, column) for column in range(len(table.metrics))]
    head = "".join(f'<th scope="col">{_column_name(metric)}</th>' for metric in table.metrics)
    body = ""
    for place, row in enumerate(table.rows):
        cells = "".join(
            _cell(cell, metric, place in winners, table.level)
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
        + _key(table)
        + (f'<h3>What the numbers show</h3>\n<ul class="notes">{notes}</ul>\n' if notes else "")
        + _meanings(table)
    )


def _column_name(metric: Metric) -> str:
    unit = " (%)" if metric.percent else ""
    arrow = _ARROWS.get(metric.better)
    said = f' <span class="arrow" role="img" aria-label="{metric.better} is better">{arrow}</span>' if arrow else ""
    return f"{escaped(metric.name)}{unit}{said}"


def _row_name(row: Row, baseline: str) -> str:
    role = "baseline" if row.method == baseline else "control" if row.control else ""
    said = f" <small>{role}</small>" if role else ""
    return f'<th scope="row">{escaped(row.method)}{said}</th>'


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
    c, said = cell.paired, verdict(cell, metric, level)
    parts = [number(x, metric.digits, percent=metric.percent, signed=True) for x in (c.difference, c.low, c.high)]
    sign = f'<span class="{said}" role="img" aria-label="{said}">{_SIGNS[said]}</span> ' if said else ""
    lines = (f"{sign}{parts[0]}", f"[{parts[1]}, {parts[2]}]", escaped(p_value(c.p_value)))
    return "".join(f"<small>{line}</small>" for line in lines)


def _key(table: Table) -> str:
    cells = [cell for row in table.rows for cell in row.cells if cell is not None]
    said = ["Mean ± standard deviation over seeds." if any(c.sd is not None for c in cells) else "One seed."]
    if any(cell.paired for cell in cells):
        said += [
            f"Small print: difference from {table.baseline}, its confidence interval and p-value, paired.",
            f"▲ better, ▼ worse (interval free of zero and p ≤ {table.level:g}), ○ no clear difference.",
            f"★ the best mean of its column, marked only where it is better than {table.baseline} in this sense.",
        ]
    else:
        said.append("No best value is marked: nothing was compared.")
    return f'<p class="key">{escaped(" ".join(said))}</p>\n'


def _meanings(table: Table) -> str:
    told = [(metric.name, metric.meaning) for metric in table.metrics if metric.meaning]
    if not told:
        return ""
    items = "".join(f"<dt>{escaped(name)}</dt><dd>{escaped(meaning)}</dd>" for name, meaning in told)
    return f'<details class="meanings"><summary>What the columns mean</summary><dl>{items}</dl></details>\n'
