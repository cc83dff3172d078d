"""Files of a run, read and written: damaged ones and full disks are errors that say what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from repulsive.errors import RunError
from repulsive.safety.files import write_whole


def read_json(path: Path) -> Any:
    """What a JSON file holds; None where there is none.

    Raises:
        RunError: it is damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path}: cannot be read ({error})") from None


def write_json(path: Path, value: Any) -> None:
    """`write_bytes` of JSON."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """`write_bytes` of UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a file, whole or not at all; see `safety.files`."""
    with told(path):
        write_whole(path, data)


@contextmanager
def told(path: Path) -> Iterator[None]:
    """A disk that is full, or not ours, as an error that says what to do."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path}: cannot be written ({error.strerror or error}); make room, or choose another --out, and run the "
            "same command again"
        ) from None
