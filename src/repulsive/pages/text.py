"""Text and numbers on their way into a page: the only place where either becomes markup."""

from __future__ import annotations

import html
import json
import math
import unicodedata
from typing import Any

_KEPT = "\t\n\u200c\u200d"  # white space, and the joiners that scripts and emoji need
_UNSEEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # control, format (direction marks), lone surrogate, line, paragraph


def visible(text: str) -> str:
    """Characters that act without being seen are written out: they could turn the page's text around.

    Example:
        >>> visible("a" + chr(0x202E) + "b")
        'a⟨U+202E⟩b'
    """
    return "".join(c if c in _KEPT or unicodedata.category(c) not in _UNSEEN else f"⟨U+{ord(c):04X}⟩" for c in text)


def escaped(text: str) -> str:
    """Text as it may stand between tags and between double quotes."""
    return html.escape(visible(text))


def shortened(text: str, length: int) -> str:
    """At most `length` characters, the last an ellipsis where some were cut."""
    return text if len(text) <= length else text[: length - 1] + "…"


def script_json(value: Any) -> str:
    """JSON that may stand inside a script element: no character of it can end the element or open a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def number(value: float, digits: int, *, percent: bool = False, signed: bool = False) -> str:
    """A number with fixed decimals and a true minus sign; shares times 100 where `percent`.

    Example:
        >>> number(-0.0123, 1, percent=True), number(0.5, 2, signed=True), number(math.inf, 2)
        ('−1.2', '+0.50', '∞')
    """
    if math.isnan(value):
        return "n/a"
    scaled = 100 * value if percent else value
    shown = f"{scaled:{'+' if signed else ''}.{digits}f}"
    if not signed and not shown.strip("-0."):
        shown = shown.removeprefix("-")  # nothing is left of what was below zero
    return shown.replace("inf", "∞").replace("-", "−")


def mean_and_sd(mean: float, sd: float | None, digits: int, *, percent: bool = False) -> str:
    """Mean ± standard deviation, the mean alone where there is none.

    Example:
        >>> mean_and_sd(0.71424, 0.0031, 2, percent=True), mean_and_sd(0.5, None, 3)
        ('71.42 ± 0.31', '0.500')
    """
    shown = number(mean, digits, percent=percent)
    return shown if sd is None else f"{shown} ± {number(sd, digits, percent=percent)}"


def p_value(p: float) -> str:
    """Three decimals; below that the bound."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"
