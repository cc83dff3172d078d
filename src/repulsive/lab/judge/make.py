"""Make the page for judges and its key from two files of texts."""

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

_MIN_NAME = 3  # letters; shorter system names are common words and not searched in the title


@dataclass(frozen=True)
class PageFiles:
    """Files written, and statistics of the pairs.

    Args:
        page: the HTML file.
        key: the file with its key.
        systems: names of the two systems; wins of the first are counted.
        shown: number of pairs on the page.
        pairs: number of pairs to draw from.
        only_first: number of ids missing in the second file.
        only_second: number of ids missing in the first file.
        equal: number of pairs on the page with two equal texts.
    """

    page: Path
    key: Path
    systems: tuple[str, str]
    shown: int
    pairs: int
    only_first: int
    only_second: int
    equal: int


def make(first: Path, second: Path, out: Path, *, count: int = 50, seed: int = 0, title: str = TITLE) -> PageFiles:
    """Write the page, and its key beside it.

    Args:
        first: texts of the system whose wins are counted.
        second: texts of the other system.
        out: the HTML file; the key has the same name with the suffix `.key.json`.
        count: pairs to judge.
        seed: random seed.
        title: page title, visible to judges.

    Raises:
        DataError: a file cannot be read or written, the title names a system, or the key of another page would be
            overwritten.
    """
    systems = system_names([first, second])
    for name in systems:
        if len(name) >= _MIN_NAME and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", title, re.IGNORECASE):
            raise DataError(
                f"the title {title!r} names the system {name!r}, which judges must not know; choose another title"
            )
    pairing = pair_texts(read_texts(first), read_texts(second))
    sheet = blind(pairing.pairs, count=count, seed=seed, title=title)
    if out.is_dir() or realpath(out) in (realpath(first), realpath(second)):
        raise DataError(
            f"{out}: is a folder or one of the inputs; choose another file for the page, such as judge.html"
        )
    key = out.with_suffix(".key.json")
    if key.exists() and read_key(key).page != sheet.page:
        raise DataError(f"{key}: is the key of another page and needed to count its answers; move it or change --out")
    try:
        write_whole(key, Key.of(sheet, systems, seed).as_json() + "\n")
        write_whole(out, render_sheet(sheet))
    except OSError as error:
        raise DataError(f"{error.filename or out}: cannot be written ({error.strerror})") from None
    equal = sum(one.left == one.right for one in sheet.shown)
    shown, total = len(sheet.shown), len(pairing.pairs)
    return PageFiles(out, key, systems, shown, total, pairing.only_first, pairing.only_second, equal)
