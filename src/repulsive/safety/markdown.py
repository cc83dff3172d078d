"""Text in Markdown: a name that somebody typed is shown as it is, and is no markup."""

from __future__ import annotations

import re

from repulsive.safety.terminal import one_line

_MARKS = re.compile(r"[\\`*\[\]<>|~]|&(?=#?\w+;)|(?<!\w)_|_(?!\w)|(?<=www)\.|:(?=//)|@(?=\w)")


def escaped(text: str) -> str:
    r"""A text for a cell or a sentence of Markdown, in one line.

    Example:
        >>> escaped("**Ann** | <b>")
        '\\*\\*Ann\\*\\* \\| \\<b\\>'
    """
    return _MARKS.sub(r"\\\g<0>", one_line(text))
