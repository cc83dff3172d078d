r"""Write Markdown safely: escape text that users typed, and build tables that no cell can break.

format_table(["method", "seeds"], [[escaped(label), "3"]])
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from repulsive.safety.terminal import one_line

_MARKUP = re.compile(r"[\\`*\[\]<>|~]|&(?=#?\w+;)|(?<!\w)_|_(?!\w)|(?<=www)\.|:(?=//)|@(?=\w)")
_BARE_PIPE = re.compile(r"(?<!\\)((?:\\\\)*)\|")  # a pipe after an even number of backslashes ends a cell


def escaped(text: str) -> str:
    r"""Escape plain text for a cell or a sentence of Markdown, and put it on one line.

    Example:
        >>> escaped("**Ann** | <b>")
        '\\*\\*Ann\\*\\* \\| \\<b\\>'
    """
    return _MARKUP.sub(r"\\\g<0>", one_line(text))


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    r"""Format a Markdown table.

    Cells are Markdown: emphasis, code and links keep their meaning. Line breaks become spaces, and bare pipes are
    escaped, so a cell cannot break the table. Pass text from users through `escaped` first.

    Args:
        head: titles of the columns.
        rows: cells of each row, as many as there are column titles.

    Returns:
        The lines of the table, without a final newline.

    Raises:
        ValueError: a row has more or fewer cells than the head.

    Example:
        >>> print(format_table(["rule", "cost"], [["**SVGD**", "1 | 2"]]))
        | rule | cost |
        | --- | --- |
        | **SVGD** | 1 \| 2 |
    """
    lines = [_format_row(head), _format_row(["---"] * len(head))]
    for cells in rows:
        if len(cells) != len(head):
            raise ValueError(f"expected {len(head)} cells in a row of the table, got {len(cells)}: {list(cells)}")
        lines.append(_format_row(cells))
    return "\n".join(lines)


def _format_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_BARE_PIPE.sub(r"\1\\|", " ".join(cell.splitlines())) for cell in cells) + " |"
