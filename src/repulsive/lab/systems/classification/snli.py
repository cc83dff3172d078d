"""Read SNLI: pairs of sentences labelled entailment, neutral or contradiction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from repulsive.errors import DataError
from repulsive.lab.text.lines import BadLines, first_line, read_json
from repulsive.lab.text.tsv import read_columns

CLASSES = ("entailment", "neutral", "contradiction")
COLUMNS = ("gold_label", "sentence1", "sentence2")


@dataclass(frozen=True)
class Pairs:
    """Pairs of sentences with one class each.

    Args:
        premises: first sentences.
        hypotheses: second sentences.
        labels: class of each pair, an index into `CLASSES`.
        unlabelled: number of pairs left out because annotators did not agree ("-").
        skipped: number of bad lines left out.
    """

    premises: list[str]
    hypotheses: list[str]
    labels: list[int]
    unlabelled: int = 0
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.labels)


def read_snli(path: str | Path, *, limit: int = 20) -> Pairs:
    """Read labelled pairs from the official JSON lines or tab-separated files.

    Args:
        path: a file with `gold_label`, `sentence1` and `sentence2`, plain, gzip or xz; its first line decides whether
            it is JSON.
        limit: number of bad lines that may be skipped.

    Raises:
        DataError: the file is empty, lacks a column, or has more bad lines than `limit`.
    """
    premises: list[str] = []
    hypotheses: list[str] = []
    labels: list[int] = []
    unlabelled = 0
    with BadLines(path, limit) as bad:
        is_json = first_line(path).lstrip().startswith("{")
        rows = _json_rows(path, bad) if is_json else read_columns(path, COLUMNS, bad)
        for number, (label, premise, hypothesis) in rows:
            if label == "-":
                unlabelled += 1
            elif label not in CLASSES:
                bad.skip(number, f"invalid label {label!r}, expected one of {list(CLASSES)}")
            elif not premise.strip() or not hypothesis.strip():
                bad.skip(number, "empty sentence")
            else:
                premises.append(premise)
                hypotheses.append(hypothesis)
                labels.append(CLASSES.index(label))
        if not labels:
            raise DataError(f"{path}: no usable line" + (f"; {bad.first[0]}" if bad.first else ""))
        return Pairs(premises, hypotheses, labels, unlabelled, bad.count)


def _json_rows(path: str | Path, bad: BadLines) -> Iterator[tuple[int, list[str]]]:
    for number, pair in read_json(path, bad):
        values = [pair.get(column) for column in COLUMNS]
        if all(isinstance(value, str) for value in values):
            yield number, [str(value) for value in values]
        else:
            bad.skip(number, f"lacks one of {', '.join(COLUMNS)}")
