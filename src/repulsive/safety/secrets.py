"""Remove passwords from URLs, such as an Optuna storage, before they are printed or stored."""

from __future__ import annotations

import re

_HIDDEN = "***"
# Up to the last @ of a word: an unescaped password may contain any character except a space.
_USER = re.compile(r"(?P<start>\b[a-zA-Z][a-zA-Z0-9+.-]*://[^\s:/@?#]*):[^\s]*@")
_QUERY = re.compile(
    r"(?P<start>[?&;](?:[\w-]*(?:password|passwd|pwd|secret|token|credential)[\w-]*|api[_-]?key))=[^\s&;'\"]*", re.I
)


def redact(text: str) -> str:
    """Hide passwords in the URLs of a text.

    Example:
        >>> redact("postgresql://ann:secret@host/db?sslpassword=other")
        'postgresql://ann:***@host/db?sslpassword=***'
    """
    return _QUERY.sub(rf"\g<start>={_HIDDEN}", _USER.sub(rf"\g<start>:{_HIDDEN}@", text))


def redact_word(word: str) -> str:
    """Hide passwords in one command-line argument, where a password may also contain spaces."""
    head, separator, rest = word.partition("://")
    if not separator or "@" not in rest:
        return redact(word)
    user, colon, _ = rest.rpartition("@")[0].partition(":")
    return redact(f"{head}://{user}{colon + _HIDDEN if colon else ''}@{rest.rpartition('@')[2]}")
