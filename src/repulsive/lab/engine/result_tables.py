"""Results of finished runs as tables for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from repulsive.lab.engine.tables import COLUMNS, Cell, Row
from repulsive.metrics.compare import Comparison
from repulsive.terminal.table import Table, signed, three_digits

SHOWN = 2  # metrics in the short table


def terminal_tables(records: Sequence[Row], full: bool = False) -> list[Table | str]:
    """Make the tables of `repulsive train` and `repulsive evaluate`.

    Args:
        records: the rows; the first is the baseline.
        full: show every metric and the 95 % confidence intervals instead of the first metrics.
    """
    names = [name for name in COLUMNS if any(name in row.cells for row in records)]
    blocks: list[Table | str] = list(_full(records, names) if full else _short(records, names))
    if alone := [row.label for row in records[1:] if not row.against]:
        why = "no runs of the same seed that were scored on the same items"
        blocks.append(f"Not compared with {records[0].label}: {', '.join(alone)} ({why}).")
    return [*blocks, *(f"warning: {warning}" for row in records for warning in row.warnings)]


def _short(records: Sequence[Row], names: Sequence[str]) -> list[Table | str]:
    baseline, shown = records[0].label, names[:SHOWN]
    compared = [name for name in shown if any(name in row.against for row in records)][:1]
    rows = []
    for row in records:
        differences = [_difference(row.against.get(name)) for name in compared]
        rows.append([row.label, str(len(row.seeds)), *(format_cell(row.cells.get(name)) for name in shown)])
        rows[-1] += differences
    titles = ["method", "seeds", *shown, *(f"{name} - {baseline}" for name in compared)]
    notes = []
    if compared:
        notes.append(f"{compared[0]} - {baseline}: paired difference and its p-value.")
    if len(names) > len(shown) or compared:
        notes.append("--full: all metrics and 95 % confidence intervals.")
    return [Table(titles, rows), *([" ".join(notes)] if notes else [])]


def _full(records: Sequence[Row], names: Sequence[str]) -> list[Table | str]:
    baseline = records[0].label
    rows = []
    for name in names:
        for row in records:
            if name in row.cells:
                against = row.against.get(name)
                interval = f"{signed(against.low)} to {signed(against.high)}" if against else ""
                rows.append([name, row.label, format_cell(row.cells[name]), _difference(against), interval])
    seeds = ", ".join(f"{row.label}: {len(row.seeds)}" for row in records)
    titles = ["metric", "method", "mean ± sd", f"- {baseline}", "95 % interval"]
    if len(records) == 1:
        titles, rows = titles[:3], [row[:3] for row in rows]
    return [Table(titles, rows), f"Seeds: {seeds}."]


def format_cell(cell: Cell | None) -> str:
    """Format mean and standard deviation with three digits; empty without a value."""
    if cell is None:
        return ""
    spread = "" if math.isnan(cell.deviation) else f" ± {three_digits(cell.deviation)}"
    return three_digits(cell.mean) + spread


def _difference(comparison: Comparison | None) -> str:
    if comparison is None:
        return ""
    if math.isnan(comparison.p_value):
        return signed(comparison.difference)
    p_value = "< 0.001" if comparison.p_value < 0.001 else f"{comparison.p_value:.3f}"
    return f"{signed(comparison.difference)} (p {p_value})"
