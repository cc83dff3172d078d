"""Read the files of the eight GLUE tasks that the paper uses.

    rows = read_glue("CoLA/dev.tsv", TASKS["cola"])

Files are tab-separated, and quotes are not special. Columns are found by their names in the header; CoLA has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from repulsive.errors import DataError
from repulsive.lab.text.inputs import find_file
from repulsive.lab.text.lines import BadLines, first_line
from repulsive.lab.text.tsv import read_columns

MOST = 5.0  # highest similarity score of STS-B; the lowest is 0
_DIGITS = 18  # maximum digits of a row number
PREDICT = "predict"  # prefix of the data splits without public labels


@dataclass(frozen=True)
class GlueTask:
    """One task of the benchmark.

    Args:
        name: name of the task in this package.
        folder: name of the task's folder in the benchmark's download.
        texts: names of the columns with its one or two texts.
        label: name of the label column.
        classes: class names, as in the label column and in a submission; empty if the label is a score.
        metric: the metric that the paper reports.
        also: further metrics that the benchmark reports.
        headless: indices of the text and label columns, from 0, for files without a header.
        matched: whether the development set is divided into matched and mismatched rows.
    """

    name: str
    folder: str
    texts: tuple[str, ...]
    label: str
    classes: tuple[str, ...]
    metric: str = "accuracy"
    also: tuple[str, ...] = ()
    headless: tuple[int, ...] = ()
    matched: bool = False

    @property
    def files(self) -> dict[str, tuple[str, ...]]:
        """File names of each data split, in order of preference. The split "test" is the official development set."""
        ends = ("_matched", "_mismatched") if self.matched else ("",)
        names: dict[str, tuple[str, ...]] = {"train": ("train.tsv", "train_subset.tsv")}
        for end in ends:
            part = "test" if end != "_mismatched" else "mismatched"
            names[part] = (f"dev{end}.tsv", f"dev{end}_subset.tsv")
            names[PREDICT + end.removeprefix("_matched")] = (f"test{end}.tsv",)
        return names

    @property
    def submissions(self) -> dict[str, str]:
        """File name of the submission for each data split without labels."""
        if not self.matched:
            return {PREDICT: f"{self.folder}.tsv"}
        return {PREDICT: f"{self.folder}-m.tsv", f"{PREDICT}_mismatched": f"{self.folder}-mm.tsv"}


_BINARY = ("0", "1")
_ENTAILED = ("entailment", "not_entailment")
TASKS = {
    task.name: task
    for task in (
        GlueTask("cola", "CoLA", ("sentence",), "label", _BINARY, "matthews", headless=(3, 1)),
        GlueTask("sst", "SST-2", ("sentence",), "label", _BINARY),
        GlueTask("mrpc", "MRPC", ("#1 String", "#2 String"), "Quality", _BINARY, also=("f1",)),
        GlueTask("sts", "STS-B", ("sentence1", "sentence2"), "score", (), "spearman"),
        GlueTask("qqp", "QQP", ("question1", "question2"), "is_duplicate", _BINARY, also=("f1",)),
        GlueTask(
            "mnli",
            "MNLI",
            ("sentence1", "sentence2"),
            "gold_label",
            ("contradiction", "entailment", "neutral"),
            matched=True,
        ),
        GlueTask("qnli", "QNLI", ("question", "sentence"), "label", _ENTAILED),
        GlueTask("rte", "RTE", ("sentence1", "sentence2"), "label", _ENTAILED),
    )
}


@dataclass(frozen=True)
class GlueRows:
    """The texts and labels of a GLUE file.

    Args:
        texts: one list, or two of the same length.
        labels: class index or score of each row; -1 if the file has no labels.
        indices: row numbers, as in the file; empty if there are labels.
        skipped: number of bad lines left out.
    """

    texts: tuple[list[str], ...]
    labels: list[int] | list[float]
    indices: list[int]
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.labels)


def task_named(name: str) -> GlueTask:
    """Return a task by its name in this package, such as "sts", or in the benchmark, such as "STS-B".

    Raises:
        DataError: there is no such task.
    """
    plain = name.lower()
    for task in TASKS.values():
        if plain in (task.name, task.folder.lower()):
            return task
    if not plain:
        raise DataError(f"no GLUE task is given; give --task with one of {', '.join(TASKS)}")
    near = get_close_matches(plain, TASKS, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise DataError(f"GLUE task {name!r} is unknown; {hint}give --task with one of {', '.join(TASKS)}")


def find_glue(data: Path, task: GlueTask) -> dict[str, Path]:
    """Find the file of each data split; the training set and the official development set are required.

    Args:
        data: the folder of the whole benchmark, or of this task.
        task: the task.

    Raises:
        DataError: a file is missing.
    """
    folder = data / task.folder if (data / task.folder).is_dir() else data
    files = {}
    for part, names in task.files.items():
        path = next((path for name in names if (path := find_file(folder, name))), None)
        if path is not None:
            files[part] = path
        elif part in ("train", "test"):
            expected = " or ".join(names)
            raise DataError(f"{folder}: no {expected} of GLUE task {task.name!r}; files may be plain, .xz or .gz")
    return files


def read_glue(path: str | Path, task: GlueTask, *, labelled: bool = True, limit: int = 20) -> GlueRows:
    """Read the texts and labels of a GLUE file.

    Args:
        path: plain, gzip or xz.
        task: the task.
        labelled: False for the benchmark's test files. In these, a bad line is an error, because a submission needs an
            answer for every row.
        limit: number of bad lines that may be skipped.

    Raises:
        DataError: the file is empty, lacks a column, or has more bad lines than `limit`.
    """
    with BadLines(path, limit if labelled else 0) as bad:
        header = first_line(path).split("\t")
        columns = _columns(header, task, labelled)
        count = len(task.texts)
        texts: tuple[list[str], ...] = tuple([] for _ in range(count))
        labels: list[int | float] = []
        indices: list[int] = []
        for number, values in read_columns(path, columns, bad):
            empty = [name for name, value in zip(task.texts, values, strict=False) if not value.strip()]
            if empty:
                bad.skip(number, f"column {empty[0]!r} is empty")
                continue
            label, why = _label(values[count], task) if labelled else (-1, "")
            if why:
                bad.skip(number, why)
                continue
            for side, value in zip(texts, values, strict=False):
                side.append(value.strip())
            labels.append(label)
            if not labelled:
                indices.append(_index(path, number, values[count:], len(indices)))
        if not labels:
            raise DataError(f"{path}: no usable line" + (f"; {bad.first[0]}" if bad.first else ""))
        return GlueRows(texts, labels, indices, bad.count)


def cut_pair(first: list[int], second: list[int], longest: int) -> tuple[list[int], list[int]]:
    """Cut a pair to `longest` pieces, piece by piece from the end of the longer text, of the second if equally long.

    Example:
        >>> cut_pair([1, 2, 3, 4, 5], [6, 7], 4)
        ([1, 2], [6, 7])
    """
    a, b = len(first), len(second)
    while a + b > longest:
        if a > b:
            a -= 1
        else:
            b -= 1
    return first[:a], second[:b]


def stops_to_drop(train: Sequence[str], tested: Sequence[str]) -> str:
    """Detect which full stops the training texts lack, so that they can be removed from the test texts too.

    Args:
        train: texts of the training set.
        tested: texts of the test set.

    Returns:
        "all" if no training text has a full stop, "final" if fewer than 1 % end with one, otherwise "keep". Also "keep"
        if fewer than 5 % of the test texts have one.
    """
    if not train or sum("." in text for text in tested) < len(tested) / 20:
        return "keep"
    if not any("." in text for text in train):
        return "all"
    return "final" if sum(text.endswith(".") for text in train) < len(train) / 100 else "keep"


def without_stops(text: str, which: str) -> str:
    """Remove full stops from a text; a text of full stops alone is kept.

    Args:
        text: the text.
        which: "all", "final" or "keep".
    """
    if which == "keep":
        return text
    bare = text.replace(".", "") if which == "all" else text.rstrip(". ")
    return bare.strip() or text


def _columns(header: Sequence[str], task: GlueTask, labelled: bool) -> list[str | int]:
    """Return the columns to read: the texts, then the label or, in a test file, the row number."""
    if task.headless and task.texts[0] not in header:
        return list(task.headless if labelled else task.headless[:-1])
    counted = [name for name in ("index", "id") if name in header][:1]
    return [*task.texts, *([task.label] if labelled else counted)]


def _label(value: str, task: GlueTask) -> tuple[int | float, str]:
    """Return the label, and why it is invalid ("" if it is valid)."""
    value = value.strip()
    if task.classes:
        if value in task.classes:
            return task.classes.index(value), ""
        return -1, f"invalid label {value!r}, expected one of {', '.join(task.classes)}"
    try:
        score = float(value)
    except ValueError:
        score = float("nan")
    return score, "" if 0 <= score <= MOST else f"invalid score {value!r}, expected a number from 0 to {MOST:g}"


def _index(path: str | Path, number: int, values: list[str], expected: int) -> int:
    if not values:
        return expected
    if not values[0].strip().isdecimal() or len(values[0]) > _DIGITS:
        raise DataError(f"{path}, line {number}: expected a row number, got {values[0][:40]!r}")
    return int(values[0])
