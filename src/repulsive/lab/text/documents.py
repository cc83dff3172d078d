"""Read the documents of a corpus one by one, without unpacking archives to disk.

A text file, plain, xz or gzip, has one paragraph per line and a blank line between documents. In an archive, such as
those of OpenWebText (a tar of xz-compressed tars of texts), every text is one document.
"""

from __future__ import annotations

import gzip
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from os.path import realpath
from pathlib import Path
from typing import IO, Any

from repulsive.errors import DataError
from repulsive.lab.text.lines import BadLines, open_bytes, read_lines
from repulsive.safety.limits import Unpacked, counted

Document = list[str]  # paragraphs that are not empty
ENDINGS = (".txt", ".xz", ".gz", ".tar", ".tgz")
_MAGIC = slice(257, 262)  # the bytes of a tar file that read "ustar"
_LARGEST = 1 << 28  # maximum bytes of one text; no web page is longer
_DAMAGED = (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile, tarfile.TarError)


def find_corpus(data: Path, *, apart_from: Path | None = None) -> list[Path]:
    """Find the files of a corpus.

    Args:
        data: a file, or a folder of text files and archives.
        apart_from: a file of that folder to leave out, such as the vocabulary.

    Raises:
        DataError: there are no files.
    """
    if not data.exists():
        raise DataError(f"{data}: no such file or folder; it should hold the texts to train on")
    if data.is_file():
        return [data]
    files = [path for path in data.iterdir() if path.is_file() and path.name.endswith(ENDINGS)]
    if apart_from is not None:
        files = [path for path in files if realpath(path) != realpath(apart_from)]
    if not files:
        raise DataError(f"{data}: no texts; expected *.txt, plain, .xz or .gz, or archives *.tar, *.tar.xz")
    return sorted(files)


def read_documents(path: Path, limit: int = 20) -> Iterator[Document]:
    """Read the documents of one file.

    Args:
        path: a text file or an archive, recognised by its content.
        limit: number of lines, or of texts in an archive, that may be skipped because they are not UTF-8.

    Raises:
        DataError: the file is damaged, or has too many bad lines.
    """
    with BadLines(path, limit) as bad:
        if _is_archive(path):
            unpacked = Unpacked(path, path.stat().st_size)
            with _whole(path), open_bytes(path, unpacked) as file:
                yield from _texts(file, path.name, bad, unpacked)
        else:
            yield from _paragraphs(path, bad)


def _paragraphs(path: Path, bad: BadLines) -> Iterator[Document]:
    document: Document = []
    for _, line in read_lines(path, bad):
        if text := line.strip():
            document.append(text)
        elif document:
            yield document
            document = []
    if document:
        yield document


def _texts(file: IO[bytes], name: str, bad: BadLines, unpacked: Unpacked, depth: int = 2) -> Iterator[Document]:
    """Read every text of a tar file, and of tar files inside it, as a stream."""
    with tarfile.open(fileobj=file, mode="r|") as archive:
        for member in archive:
            inner = archive.extractfile(member) if member.isfile() else None
            if inner is None:
                continue
            if member.name.endswith(".txt"):
                if document := _document(inner.read(_LARGEST), f"{name}: {member.name}", bad):
                    yield document
            elif member.name.endswith((".xz", ".gz", ".tar")) and depth > 1:
                yield from _texts(_unpacked(inner, unpacked), f"{name}: {member.name}", bad, unpacked, depth - 1)


def _document(raw: bytes, name: str, bad: BadLines) -> Document:
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        bad.skip_named(name, f"byte {error.start} (0x{raw[error.start]:02x}) is not UTF-8")
        return []
    return [line for part in text.split("\n") if (line := part.strip())]


def _unpacked(file: IO[bytes], unpacked: Unpacked) -> Any:
    start = file.peek(6)  # type: ignore[attr-defined]
    if start.startswith(b"\xfd7zXZ\x00"):
        return counted(lambda: lzma.open(file, "rb"), unpacked)
    return counted(lambda: gzip.open(file, "rb"), unpacked) if start.startswith(b"\x1f\x8b") else file


def _is_archive(path: Path) -> bool:
    with _whole(path), open_bytes(path) as file:
        return file.read(_MAGIC.stop)[_MAGIC] == b"ustar"


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    try:
        yield
    except _DAMAGED as error:
        raise DataError(f"{path}: truncated or damaged ({error}); download it again") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None
