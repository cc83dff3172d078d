"""Print the results of finished runs in the format that the options name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from repulsive.cli.output import print_json, print_tables, print_text

if TYPE_CHECKING:
    from repulsive.lab.engine.tables import Row


def print_results(rows: Sequence[Row], *, full: bool, markdown: bool, as_json: bool) -> None:
    """Print rows of results as JSON, as Markdown, or as a table for a terminal."""
    from repulsive.lab.engine.result_tables import terminal_tables
    from repulsive.lab.engine.tables import as_markdown, as_plain

    if as_json:
        print_json([as_plain(row) for row in rows])
    elif markdown:
        print_text(as_markdown(rows))
    else:
        print_tables(terminal_tables(rows, full))
