"""Make untrusted text safe to print: escape control characters from data, recipes and file names."""

from __future__ import annotations

import unicodedata

from repulsive.safety.secrets import redact

_KEPT = "\n\t"
_ESCAPED = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")  # control, format, surrogate, private use, line separators
_JOINERS = "\u200c\u200d"  # used by some languages and many emoji


def printable(text: str) -> str:
    r"""Hide passwords and escape characters that control a terminal.

    Example:
        >>> printable("a\x1b[31mb\u202ec")
        'a\\x1b[31mb\\u202ec'
    """
    return "".join(_escape(character) for character in redact(text))


def one_line(text: str) -> str:
    """Make text safe to print with `printable`, and put it on one line."""
    return printable(" ".join(text.split()))


def _escape(character: str) -> str:
    if character in _KEPT or character in _JOINERS or unicodedata.category(character) not in _ESCAPED:
        return character
    number = ord(character)
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}" if number < 65536 else f"\\U{number:08x}"
