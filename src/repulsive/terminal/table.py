"""Tables as data, and their text for a terminal."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from repulsive.safety.terminal import one_line, printable

_UNLIMITED = 100_000  # columns of a file or pipe: no line is wrapped
_MARKDOWN = 100  # columns of rendered Markdown, whose headings and tables fill the width
_NUMBER = re.compile(r"(?:[-+−<±%()\[\].,\s\d]|e-|\b(?:p|of|to|ms|s|B)\b)+|n/a")  # numbers, units, intervals, p-values


@dataclass(frozen=True)
class Table:
    """A table of text.

    Args:
        columns: titles of the columns.
        rows: cells of each row, as many as there are columns.
        title: line above the table; empty for none.
        widths: minimum widths of the first columns, to align several tables.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    widths: Sequence[int] = ()


@dataclass(frozen=True)
class MarkdownText:
    """Text in Markdown, which is rendered for a terminal."""

    text: str


def three_digits(value: float | None) -> str:
    """Format a number with three digits; numbers below 1 get three decimals.

    Example:
        >>> [three_digits(value) for value in (0.87316, 27.312, 1234.5, 0.00042, None)]
        ['0.873', '27.3', '1,234', '4.2e-04', 'n/a']
    """
    if value is None or not math.isfinite(value):
        return "n/a"
    size = abs(value)
    if 0 < size < 0.0005:
        return f"{value:.1e}"
    decimals = 3 if size < 0.9995 else 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{value:,.{decimals}f}"


def signed(value: float | None) -> str:
    """Format a difference as `three_digits` does, with its sign.

    Example:
        >>> signed(0.25), signed(-3.0)
        ('+0.250', '-3.00')
    """
    text = three_digits(value)
    return text if value is None or value < 0 or text == "n/a" else f"+{text}"


def render(blocks: Iterable[Table | MarkdownText | str], file: TextIO) -> str:
    """Lay out tables and paragraphs, with an empty line between two blocks.

    Lines fit the width of a terminal, or `COLUMNS` where it is set. For other files no line is wrapped and no cell is
    shortened. Control characters are escaped.

    Args:
        blocks: tables, paragraphs and Markdown.
        file: where the text will be printed.

    Returns:
        The text without a final newline, in the colours of the terminal.
    """
    from rich.console import Console

    console = Console(file=file, highlight=False, width=_width(file))
    texts = []
    for block in blocks:
        with console.capture() as capture:
            most = min(console.width, _MARKDOWN) if isinstance(block, MarkdownText) else None
            console.print(_as_rich(block), width=most)
        texts.append("\n".join(line.rstrip() for line in capture.get().rstrip("\n").split("\n")))
    return "\n\n".join(texts)


def _width(file: TextIO) -> int | None:
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns) > 0:
        return int(columns)
    return None if file.isatty() else _UNLIMITED  # None: the width of the terminal


def _as_rich(block: Table | MarkdownText | str) -> Any:
    from rich.markdown import Markdown
    from rich.text import Text

    if isinstance(block, str):
        return Text(printable(block))
    return Markdown(printable(block.text), hyperlinks=False) if isinstance(block, MarkdownText) else _as_grid(block)


def _as_grid(table: Table) -> Any:
    from rich.table import Table as RichTable
    from rich.text import Text

    for row in table.rows:
        if len(row) != len(table.columns):
            raise ValueError(f"expected {len(table.columns)} cells in a row of the table, got {len(row)}: {list(row)}")
    title = Text(one_line(table.title), style="bold") if table.title else None
    drawn = RichTable(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(table.columns):
        cells = [row[index] for row in table.rows if row[index]]
        is_number = index > 0 and bool(cells) and all(_NUMBER.fullmatch(cell) for cell in cells)
        drawn.add_column(
            Text(one_line(name)),
            justify="right" if is_number else "left",
            overflow="fold",
            no_wrap=is_number,
            min_width=table.widths[index] if index < len(table.widths) else None,
        )
    for row in table.rows:
        drawn.add_row(*(Text(one_line(cell)) for cell in row))
    return drawn
