"""Text for a terminal: what comes from data, recipes and file names must not act on it."""

from __future__ import annotations

import unicodedata

from repulsive.safety.secrets import redact

_KEPT = "\n\t"
_HIDING = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")  # controls, invisible signs, half characters, other line ends
_JOINERS = "\u200c\u200d"  # words of some languages and many emoji have them


def printable(text: str) -> str:
    r"""A text without passwords and without signs that act on a terminal; each is shown as its number instead.

    Example:
        >>> printable("a\x1b[31mb\u202ec")
        'a\\x1b[31mb\\u202ec'
    """
    return "".join(_shown(sign) for sign in redact(text))


def one_line(text: str) -> str:
    """The same in one line."""
    return printable(" ".join(text.split()))


def _shown(sign: str) -> str:
    if sign in _KEPT or sign in _JOINERS or unicodedata.category(sign) not in _HIDING:
        return sign
    number = ord(sign)
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}" if number < 65536 else f"\\U{number:08x}"
