"""The text of the demo: English prose from the documentation that every Python installation contains.

    text = documentation()                   # paragraphs of docstrings and of the language reference
    train, held_out = split(text)            # int64 [N], [N']: bytes

Nothing is downloaded. The text depends on the version of Python, so its checksum is part of the results.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from repulsive.errors import DataError

VOCABULARY = 128  # the text is ASCII
_SHORTEST = 80  # characters of a paragraph: shorter ones are mostly headings
_SMALLEST = 200_000  # bytes; with less text a model would learn it by heart
_BLOCK = 8_192  # bytes; neighbouring paragraphs stay together, so that held-out text is new text
_EVERY = 10  # one block in ten is held out


def documentation() -> str:
    """Collect the prose of Python's own documentation: one paragraph per line, each paragraph once.

    Raises:
        DataError: this Python was installed without the sources of its standard library.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    paragraphs = dict.fromkeys(_prose(folder))  # the reference repeats paragraphs; a dictionary keeps their order
    text = "\n".join(paragraphs) + "\n"
    if len(text) < _SMALLEST:
        raise DataError(
            f"{folder}: expected {_SMALLEST:,} bytes of documentation in Python's standard library, got {len(text):,}; "
            "use a Python with its sources, or run: repulsive demo --table"
        )
    return text


def split(text: str) -> tuple[Tensor, Tensor]:
    """Split a text by blocks of paragraphs into training and held-out bytes, int64 [N] and [N']."""
    train, held_out = "".join(_blocks(text, held_out=False)), "".join(_blocks(text, held_out=True))
    return encode(train), encode(held_out)


def sentences(text: str, count: int, shortest: int = 36, longest: int = 48) -> list[str]:
    """Choose held-out sentences, evenly spaced, without code and quotation marks.

    Args:
        text: the whole text.
        count: number of sentences.
        shortest: minimum length in characters.
        longest: maximum length in characters.

    Raises:
        DataError: there is no such sentence.
    """
    held_out = " ".join(_blocks(text, held_out=True))
    plain = [each for each in re.findall(r"(?<=[.] )[A-Z][a-z ,]+[.](?= |\n)", held_out) if each.count(" ") > 4]
    fitting = list(dict.fromkeys(each for each in plain if shortest <= len(each) <= longest))
    if not fitting:
        raise DataError(f"the held-out text has no sentence of {shortest} to {longest} plain characters; use more text")
    every = max(1, len(fitting) // count)
    return fitting[::every][:count]


def encode(text: str) -> Tensor:
    """Encode ASCII text as token ids, int64 [N]."""
    return torch.frombuffer(bytearray(text.encode("ascii")), dtype=torch.uint8).long()


def _blocks(text: str, *, held_out: bool) -> Iterator[str]:
    """Yield the blocks of the text that are held out, or all others."""
    lines, size, number = list[str](), 0, 0
    for line in [*text.splitlines(keepends=True), ""]:
        lines.append(line)
        size += len(line)
        if size >= _BLOCK or not line:
            if (number % _EVERY == _EVERY // 2) is held_out:
                yield "".join(lines)
            lines, size, number = [], 0, number + 1


def _prose(folder: Path) -> Iterator[str]:
    """Yield paragraphs of prose: docstrings of the modules in a folder, then the language reference of `help()`."""
    for path in sorted(folder.glob("*.py")):
        for text in _docstrings(path):
            yield from _paragraphs(text)
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        return
    for name in sorted(topics):
        yield from _paragraphs(topics[name])


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def _paragraphs(text: str) -> Iterator[str]:
    """Yield paragraphs that read like prose: they start with a capital letter and end with a full stop or a colon."""
    for paragraph in re.split(r"\n\s*\n", text):
        line = " ".join(paragraph.split())
        is_sentence = line[:1].isupper() and line.endswith((".", ":"))
        if is_sentence and len(line) >= _SHORTEST and line.isascii() and line.isprintable() and ">>>" not in line:
            yield line
