"""The files judges send: reading them, and what is wrong with some."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from repulsive.errors import DataError
from repulsive.lab.judge.criteria import CHOICES, CRITERIA
from repulsive.lab.judge.key import FORMAT as KEY_FORMAT
from repulsive.lab.judge.key import Key, read_json

FORMAT = "repulsive-judge-answers"


@dataclass(frozen=True)
class Answers:
    """What one judge said: item number, criterion, and "left", "tie" or "right"."""

    judge: str
    chosen: dict[int, dict[str, str]]


def read_answers(path: str | Path, key: Key) -> Answers:
    """Read one exported file.

    Raises:
        DataError: it is damaged, no export, one of another page, has no name, no answers, or impossible ones.
    """
    row = read_json(path)
    if row.get("format") == KEY_FORMAT:
        raise DataError(f"{path}: is a key, not the answers of a judge")
    if row.get("format") != FORMAT:
        raise DataError(f"{path}: is no file of answers; judges make one with the page's button 'Save as file'")
    if row.get("page") != key.page or row.get("seal") != key.seal:
        raise DataError(f"{path}: answers another page ({row.get('page')!r}) than the key's ({key.page!r})")
    judge, answers = row.get("judge"), row.get("answers")
    judge = _name(judge) if isinstance(judge, str) else ""
    if not judge:
        raise DataError(f'{path}: has no name of a judge; write one into its "judge"')
    if not isinstance(answers, list):
        raise DataError(f"{path}: is damaged: its answers are no list")
    chosen: dict[int, dict[str, str]] = {}
    for one in answers:
        item = one.get("item") if isinstance(one, dict) else None
        if not isinstance(item, int) or isinstance(item, bool) or not 1 <= item <= len(key.ids):
            raise DataError(f"{path}: is damaged: it answers item {item!r} of {len(key.ids)}")
        if item in chosen:
            raise DataError(f"{path}: is damaged: it answers item {item} twice")
        said = {name: value for name, value in one.items() if name != "item"}
        for name, value in said.items():
            if name not in CRITERIA or value not in CHOICES:
                raise DataError(f"{path}: is damaged: item {item} has {name!r}: {value!r}")
        chosen[item] = said
    if not any(chosen.values()):
        raise DataError(f"{path}: {judge!r} has answered nothing yet")
    return Answers(judge, chosen)


def _name(text: str) -> str:
    """What can be seen of a name: JSON can spell half characters, and signs that act on a terminal."""
    whole = " ".join(text.encode("utf-8", "replace").decode().split())
    return "".join(c for c in whole if unicodedata.category(c) not in ("Cc", "Cf")).strip()


def read_all(paths: Sequence[Path], key: Key) -> list[Answers]:
    """Answers of all judges.

    Raises:
        DataError: as `read_answers`, or two files are by one judge.
    """
    found: dict[str, tuple[Path, Answers]] = {}
    for path in paths:
        answers = read_answers(path, key)
        name = unicodedata.normalize("NFKC", answers.judge).casefold()
        if name in found:
            raise DataError(f"{found[name][0]} and {path}: both are by {answers.judge!r}; give one of them")
        found[name] = path, answers
    if not found:
        raise DataError("there are no answers to count; give the files that judges saved")
    return [answers for _, answers in found.values()]
