"""Read and check the files that judges send."""

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
    """Answers of one judge: item number -> criterion -> "left", "tie" or "right"."""

    judge: str
    chosen: dict[int, dict[str, str]]


def read_answers(path: str | Path, key: Key) -> Answers:
    """Read the file of one judge.

    Raises:
        DataError: the file is damaged, is not a file of answers, belongs to another page, or has no name, no answers
            or invalid answers.
    """
    row = read_json(path)
    if row.get("format") == KEY_FORMAT:
        raise DataError(f"{path}: expected the answers of a judge, got a key")
    if row.get("format") != FORMAT:
        raise DataError(f"{path}: not a file of answers; judges create one with the button 'Save as file' of the page")
    if row.get("page") != key.page or row.get("seal") != key.seal:
        raise DataError(
            f"{path}: has answers to another page ({row.get('page')!r}) than that of the key ({key.page!r})"
        )
    judge, answers = row.get("judge"), row.get("answers")
    judge = _name(judge) if isinstance(judge, str) else ""
    if not judge:
        raise DataError(f'{path}: the name of the judge is missing; add it under "judge"')
    if not isinstance(answers, list):
        raise DataError(f"{path}: is damaged: expected a list of answers, got {type(answers).__name__}")
    chosen: dict[int, dict[str, str]] = {}
    for one in answers:
        item = one.get("item") if isinstance(one, dict) else None
        if not isinstance(item, int) or isinstance(item, bool) or not 1 <= item <= len(key.ids):
            raise DataError(f"{path}: is damaged: there is no item {item!r} among {len(key.ids)} items")
        if item in chosen:
            raise DataError(f"{path}: is damaged: item {item} is answered twice")
        choices = {name: value for name, value in one.items() if name != "item"}
        for name, value in choices.items():
            if name not in CRITERIA or value not in CHOICES:
                raise DataError(f"{path}: is damaged: item {item} has the invalid answer {name!r}: {value!r}")
        chosen[item] = choices
    if not any(chosen.values()):
        raise DataError(f"{path}: {judge!r} has not answered anything yet")
    return Answers(judge, chosen)


def _name(text: str) -> str:
    """Clean a name: replace lone surrogates and remove control characters, which would act on a terminal."""
    valid = " ".join(text.encode("utf-8", "replace").decode().split())
    return "".join(c for c in valid if unicodedata.category(c) not in ("Cc", "Cf")).strip()


def read_all(paths: Sequence[Path], key: Key) -> list[Answers]:
    """Read the files of all judges.

    Raises:
        DataError: as in `read_answers`, or two files are from the same judge.
    """
    by_judge: dict[str, tuple[Path, Answers]] = {}
    for path in paths:
        answers = read_answers(path, key)
        name = unicodedata.normalize("NFKC", answers.judge).casefold()
        if name in by_judge:
            raise DataError(f"{by_judge[name][0]} and {path}: both are from {answers.judge!r}; pass only one of them")
        by_judge[name] = path, answers
    if not by_judge:
        raise DataError("there are no answers to count; pass the files that judges saved")
    return [answers for _, answers in by_judge.values()]
