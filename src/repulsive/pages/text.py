"""Escaping of text and formatting of numbers for pages."""

from __future__ import annotations

import html
import json
import math
import unicodedata
from typing import Any

_KEPT = "\t\n\u200c\u200d"  # white space, and the joiners that some scripts and emoji need
_INVISIBLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # control, format (direction marks), lone surrogate, line, paragraph


def visible(text: str) -> str:
    """Replace invisible control characters by their code points; direction marks could reorder the text of the page.

    Example:
        >>> visible("a" + chr(0x202E) + "b")
        'a⟨U+202E⟩b'
    """
    return "".join(c if c in _KEPT or unicodedata.category(c) not in _INVISIBLE else f"⟨U+{ord(c):04X}⟩" for c in text)


def escaped(text: str) -> str:
    """Escape text for use between tags and in double-quoted attributes."""
    return html.escape(visible(text))


def shortened(text: str, length: int) -> str:
    """Cut text to `length` characters; if characters were cut, the last one is an ellipsis."""
    return text if len(text) <= length else text[: length - 1] + "…"


def script_json(value: Any) -> str:
    """Encode as JSON that is safe inside a script element: it cannot close the element or open a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def number(value: float, digits: int, *, percent: bool = False, signed: bool = False) -> str:
    """Format a number with fixed decimals and a typographic minus sign.

    Args:
        value: the number; NaN becomes "n/a".
        digits: decimals.
        percent: multiply by 100.
        signed: show a plus sign, too.

    Example:
        >>> number(-0.0123, 1, percent=True), number(0.5, 2, signed=True), number(math.inf, 2)
        ('−1.2', '+0.50', '∞')
    """
    if math.isnan(value):
        return "n/a"
    scaled = 100 * value if percent else value
    shown = f"{scaled:{'+' if signed else ''}.{digits}f}"
    if not signed and not shown.strip("-0."):
        shown = shown.removeprefix("-")  # a number that rounds to zero has no minus sign
    return shown.replace("inf", "∞").replace("-", "−")


def mean_and_sd(mean: float, sd: float | None, digits: int, *, percent: bool = False) -> str:
    """Format mean ± standard deviation, or the mean alone if `sd` is None.

    Example:
        >>> mean_and_sd(0.71424, 0.0031, 2, percent=True), mean_and_sd(0.5, None, 3)
        ('71.42 ± 0.31', '0.500')
    """
    shown = number(mean, digits, percent=percent)
    return shown if sd is None else f"{shown} ± {number(sd, digits, percent=percent)}"


def p_value(p: float) -> str:
    """Format a p-value with three decimals, or as "p < 0.001"."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"
