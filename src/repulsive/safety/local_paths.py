"""Refuse URLs such as `s3://bucket/runs` where files are read or written: all paths are local."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from repulsive.safety.secrets import redact_word

_URL = re.compile(r"(?:^|=)((?P<scheme>[A-Za-z][A-Za-z0-9+.-]+)://.*)", re.S)
_TAKES_URL = "--storage"  # a database, not a path


def remote_argument(arguments: Sequence[str]) -> str | None:
    """Find a URL among the arguments of a command and return an error message; None if there is none.

    Args:
        arguments: the words after `repulsive`.
    """
    for before, word in itertools.pairwise(["", *arguments]):
        if before == _TAKES_URL or word.startswith(f"{_TAKES_URL}="):
            continue
        if match := _URL.search(word):
            return _message(redact_word(match[1]), match["scheme"])
    return None


def remote_folder(path: Path) -> str | None:
    """Return an error message for a path that was made from a URL; None for a local path.

    `Path("s3://bucket/runs")` is `s3:/bucket/runs`, a folder named `s3:` in the current directory.
    """
    scheme, colon, _ = (path.parts[0] if path.parts else "").partition(":")
    if colon and len(scheme) > 1 and len(path.parts) > 1 and _URL.match(f"{scheme}://"):
        return _message(str(path), scheme)
    return None


def _message(url: str, scheme: str) -> str:
    copy = f'fsspec.filesystem("{scheme}").put("runs", "bucket/runs", recursive=True)'
    return f"{url}: expected a local path, got a URL; train to a local folder, then copy it: {copy}"
