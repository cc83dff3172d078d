"""The cost of repulsion in the paper's Transformer-small as a table for a terminal."""

from __future__ import annotations

from typing import Any

from repulsive.lab.bench.steps import VARIANTS
from repulsive.terminal.table import Table, three_digits


def terminal_tables(facts: dict[str, Any], full: bool = False) -> list[Table | str]:
    """Make the table of step-time ratios, and a line about the update alone.

    Args:
        facts: result of `repulsive.lab.bench.report.run`.
        full: show 95 % confidence intervals.
    """
    sizes = {size: rows for size, rows in facts.get("steps", {}).items() if rows}
    measured = [name for name in VARIANTS if any(name in rows for rows in sizes.values())]
    cells = [[name, *(_cell(name, rows.get(name), full) for rows in sizes.values())] for name in measured]
    blocks: list[Table | str] = []
    if cells:
        titles = ["variant", *(f"{int(size):,} tokens" for size in sizes)]
        blocks.append(Table(titles, cells, "step time / plain step"))
    update = facts["update"]
    alone = f"update alone: {1e3 * update['update_seconds']:.3f} ms, floor {1e3 * update['floor_seconds']:.3f} ms"
    where = f"{facts['machine']}, {facts['threads']} threads, torch {facts['torch']}"
    return [*blocks, f"{alone}. {where}{', compiled' if facts['options']['compiled'] else ''}."]


def _cell(name: str, row: dict[str, float] | None, full: bool) -> str:
    if row is None:
        return ""
    if name == "MA":
        return f"1 ({three_digits(1e3 * row['seconds'])} ms)"
    interval = f" ({row['low']:.3f} to {row['high']:.3f})" if full else ""
    return f"{row['ratio']:.3f}{interval}"
