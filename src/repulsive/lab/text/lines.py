"""Read lines of text files, plain or compressed, and count the bad lines."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

from repulsive.errors import DataError
from repulsive.safety.limits import Unpacked, counted

_SHOWN = 3  # bad lines quoted in a message
_LONGEST = 1 << 26  # maximum bytes of one line; a longer line is not text, or is made to fill the memory


class BadLines:
    """Count the lines that are skipped, and raise an error if there are too many.

    As a context manager, it issues one warning about the skipped lines at the end of the block.

    Args:
        path: the file, for messages.
        limit: number of lines that may be skipped.

    Example:
        >>> bad = BadLines("reviews.json", limit=0)
        >>> bad.skip(7, "no stars")
        Traceback (most recent call last):
        repulsive.errors.DataError: reviews.json: more than 0 bad lines; line 7: no stars
    """

    def __init__(self, path: str | Path, limit: int = 20) -> None:
        self.path = path
        self.limit = limit
        self.count = 0
        self.first: list[str] = []

    def skip(self, line: int, why: str) -> None:
        """Count one skipped line.

        Raises:
            DataError: more lines than the limit were skipped.
        """
        self.skip_named(f"line {line}", why)

    def skip_named(self, place: str, why: str) -> None:
        """Count a skipped item that is identified by a name instead of a line number."""
        self.count += 1
        if len(self.first) < _SHOWN:
            self.first.append(f"{place}: {why}")
        if self.count > self.limit:
            raise DataError(f"{self.path}: more than {self.limit} bad lines; {'; '.join(self.first)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self.count and error is None:
            more = "; ..." if self.count > _SHOWN else ""
            lines = "bad line" if self.count == 1 else "bad lines"
            text = f"{self.path}: {self.count} {lines} skipped: {'; '.join(self.first)}{more}"
            warnings.warn(text, stacklevel=3)


def read_lines(path: str | Path, bad: BadLines | None = None) -> Iterator[tuple[int, str]]:
    """Yield the lines of a UTF-8 file without their line ends, numbered from 1.

    Only a line feed ends a line: texts may contain the other line separators of Unicode. A byte order mark is dropped.
    A line has at most 64 MiB after decompression.

    Args:
        path: a plain, gzip or xz file, recognised by its first bytes.
        bad: counter of skipped lines, which are not UTF-8 or contain NUL bytes; None: such a line is an error.

    Raises:
        DataError: the file is missing, unreadable or truncated, or a line is bad or too long.
    """
    number = 0
    with _missing_named(path), open_bytes(path) as file:
        try:
            for number, raw in enumerate(iter(lambda: file.readline(_LONGEST), b""), 1):
                if len(raw) == _LONGEST:
                    raise DataError(f"{path}, line {number}: longer than {_LONGEST:,} bytes; is it a text file?")
                text, why = _decode(raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw)
                if not why:
                    yield number, text
                elif bad is not None:
                    bad.skip(number, why)
                else:
                    raise DataError(f"{path}, line {number}: {why}; convert the file to UTF-8 text")
        except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{path}: truncated or damaged after line {number} ({error}); download it again") from None


def read_json(path: str | Path, bad: BadLines) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a file of JSON lines with their line numbers; other lines are skipped and counted."""
    for number, line in read_lines(path, bad):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            value = replace_surrogates(value) if "\\u" in line else value
        except json.JSONDecodeError as error:
            bad.skip(number, f"not JSON ({error.msg} at character {error.pos})")
            continue
        except (ValueError, RecursionError):
            bad.skip(number, "JSON with too long a number or too deep brackets")
            continue
        if isinstance(value, dict):
            yield number, value
        else:
            bad.skip(number, "not a JSON object")


def replace_surrogates(value: Any) -> Any:
    """Replace lone surrogates by question marks: JSON can contain them, UTF-8 cannot."""
    written = json.dumps(value, ensure_ascii=False)
    try:
        written.encode()
    except UnicodeEncodeError:
        return json.loads(written.encode("utf-8", "replace"))
    return value


def first_line(path: str | Path) -> str:
    """Return the first readable line, by which readers recognise the kind of a file.

    Raises:
        DataError: the file is empty.
    """
    for _, line in read_lines(path, BadLines(path)):
        return line
    raise DataError(f"{path}: empty file")


def open_bytes(path: str | Path, unpacked: Unpacked | None = None) -> BinaryIO:
    """Open a plain, gzip or xz file for reading bytes.

    Args:
        path: the file.
        unpacked: counter of the bytes that a compressed file unpacks to; a new counter by default.

    Raises:
        DataError: while reading, if a compressed file unpacks to more than the limit; see `safety.limits`.
    """
    with open(path, "rb") as file:
        start = file.read(6)
    unpacked = unpacked or Unpacked(path, os.path.getsize(path))
    if start.startswith(b"\x1f\x8b"):
        return cast(BinaryIO, counted(lambda: gzip.open(path, "rb"), unpacked))
    if start == b"\xfd7zXZ\x00":
        return cast(BinaryIO, counted(lambda: lzma.open(path, "rb"), unpacked))
    return open(path, "rb")


def _decode(raw: bytes) -> tuple[str, str]:
    """Decode a line; also return the reason why it is not text ("" if it is text)."""
    if b"\x00" in raw:
        return "", "contains a NUL byte: not text, or UTF-16"
    try:
        return raw.decode("utf-8").rstrip("\r\n"), ""
    except UnicodeDecodeError as error:
        return "", f"byte {error.start} (0x{raw[error.start]:02x}) is not UTF-8"


@contextmanager
def _missing_named(path: str | Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise DataError(f"{path}: expected a file, found a folder") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None
