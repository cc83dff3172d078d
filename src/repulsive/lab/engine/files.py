"""Read and write files of a run, with errors that say what to do about damaged files and full disks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from repulsive.errors import RunError
from repulsive.safety.files import write_whole


def read_json(path: Path) -> Any:
    """Read a JSON file; return None if the file does not exist.

    Raises:
        RunError: the file is damaged.
    """
    text = b""
    try:
        text = path.read_bytes()
        return json.loads(text)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        problem = "is not JSON" if text else "is empty"
        remedy = "restore it from a copy, or remove it and run the command that made it"
        raise RunError(f"{path}: cannot be read ({problem}); {remedy}") from None


def write_json(path: Path, value: Any) -> None:
    """Replace a file by JSON; see `write_bytes`."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file by UTF-8 text; see `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a file atomically, without following links.

    Raises:
        RunError: the file cannot be written.
    """
    with write_errors(path):
        write_whole(path, data)


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` raised in the block, such as a full disk, into a `RunError` that says what to do."""
    try:
        yield
    except OSError as error:
        remedy = "choose" if isinstance(error, PermissionError) else "make room, or choose"
        raise RunError(
            f"{path}: cannot be written ({error.strerror or error}); {remedy} another --out, and run the same command "
            "again"
        ) from None
