"""From two files of texts to a page for judges and its key."""

from __future__ import annotations

import re
from dataclasses import dataclass
from os.path import realpath
from pathlib import Path

from repulsive.errors import DataError
from repulsive.lab.judge.blind import TITLE, blind
from repulsive.lab.judge.key import Key, read_key, system_names
from repulsive.lab.judge.page import render_sheet
from repulsive.lab.judge.texts import pair_texts, read_texts
from repulsive.pages.html.document import write_whole

_TELLING = 3  # letters: shorter names of systems are words of every other title


@dataclass(frozen=True)
class Made:
    """What was written, and what there was to write.

    Args:
        page: the HTML file.
        key: its key.
        systems: names of the two; the first one's wins will be counted.
        shown: pairs on the page.
        pairs: pairs to draw from.
        only_first: ids that the second file lacks.
        only_second: ids that the first file lacks.
        equal: pairs on the page whose texts are the same.
    """

    page: Path
    key: Path
    systems: tuple[str, str]
    shown: int
    pairs: int
    only_first: int
    only_second: int
    equal: int


def make(first: Path, second: Path, out: Path, *, count: int = 50, seed: int = 0, title: str = TITLE) -> Made:
    """Write `out` and, beside it, `out` with `.key.json` for its end.

    Raises:
        DataError: a file cannot be read, the title names a system, or the key of another page would be lost.
    """
    systems = system_names([first, second])
    for name in systems:
        if len(name) >= _TELLING and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", title, re.IGNORECASE):
            raise DataError(f"the title {title!r} names the system {name!r}; judges would read it: choose another")
    found = pair_texts(read_texts(first), read_texts(second))
    sheet = blind(found.pairs, count=count, seed=seed, title=title)
    if out.is_dir() or realpath(out) in (realpath(first), realpath(second)):
        raise DataError(f"{out}: cannot become the page; give it a name of its own, such as judge.html")
    at = out.with_suffix(".key.json")
    if at.exists() and read_key(at).page != sheet.page:
        raise DataError(f"{at}: is the key of another page, whose answers need it; move it or choose another --out")
    try:
        write_whole(at, Key.of(sheet, systems, seed).as_json() + "\n")
        write_whole(out, render_sheet(sheet))
    except OSError as error:
        raise DataError(f"{error.filename or out}: cannot be written: {error.strerror}") from None
    equal = sum(one.left == one.right for one in sheet.shown)
    return Made(out, at, systems, len(sheet.shown), len(found.pairs), found.only_first, found.only_second, equal)
