"""Print the results of finished runs in the format that the options name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from repulsive.cli.say import say, say_json, say_tables

if TYPE_CHECKING:
    from repulsive.lab.engine.tables import Row


def say_results(rows: Sequence[Row], *, full: bool, markdown: bool, as_json: bool) -> None:
    """Print rows of results as JSON, as Markdown, or as a table for a terminal."""
    from repulsive.lab.engine.result_tables import terminal_tables
    from repulsive.lab.engine.tables import as_markdown, as_plain

    if as_json:
        say_json([as_plain(row) for row in rows])
    elif markdown:
        say(as_markdown(rows))
    else:
        say_tables(terminal_tables(rows, full))
