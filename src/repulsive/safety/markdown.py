"""Escape text for Markdown, so that names and labels cannot add markup."""

from __future__ import annotations

import re

from repulsive.safety.terminal import one_line

_MARKS = re.compile(r"[\\`*\[\]<>|~]|&(?=#?\w+;)|(?<!\w)_|_(?!\w)|(?<=www)\.|:(?=//)|@(?=\w)")


def escaped(text: str) -> str:
    r"""Escape a text for a table cell or a sentence of Markdown, on one line.

    Example:
        >>> escaped("**Ann** | <b>")
        '\\*\\*Ann\\*\\* \\| \\<b\\>'
    """
    return _MARKS.sub(r"\\\g<0>", one_line(text))
