"""Passwords that must not be printed or kept: those in URLs, such as an Optuna storage on a database server."""

from __future__ import annotations

import re

_HIDDEN = "***"
# Up to the last @ of a word: an unescaped password may have any character but a space.
_USER = re.compile(r"(?P<start>\b[a-zA-Z][a-zA-Z0-9+.-]*://[^\s:/@?#]*):[^\s]*@")
_QUERY = re.compile(
    r"(?P<start>[?&;](?:[\w-]*(?:password|passwd|pwd|secret|token|credential)[\w-]*|api[_-]?key))=[^\s&;'\"]*", re.I
)


def redact(text: str) -> str:
    """Hide passwords of the URLs in a text.

    Example:
        >>> redact("postgresql://ann:secret@host/db?sslpassword=other")
        'postgresql://ann:***@host/db?sslpassword=***'
    """
    return _QUERY.sub(rf"\g<start>={_HIDDEN}", _USER.sub(rf"\g<start>:{_HIDDEN}@", text))


def redact_word(word: str) -> str:
    """The same for one word of a command line, in which a password may have spaces too."""
    head, separator, rest = word.partition("://")
    if not separator or "@" not in rest:
        return redact(word)
    user, colon, _ = rest.rpartition("@")[0].partition(":")
    return redact(f"{head}://{user}{colon + _HIDDEN if colon else ''}@{rest.rpartition('@')[2]}")
