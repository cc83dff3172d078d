"""The eight GLUE tasks of the paper: where their columns are, and how their files are read.

    rows = read_glue("CoLA/dev.tsv", TASKS["cola"])

Files are tab-separated and quotes have no meaning. Columns are found by the header's names; CoLA has no header.
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

MOST = 5.0  # points of similarity of STS-B; 0 is the least
_DIGITS = 18  # of the number of a row
PREDICT = "predict"  # parts whose labels nobody has start with this


@dataclass(frozen=True)
class GlueTask:
    """One task of the benchmark.

    Args:
        name: what it is called here.
        folder: what the benchmark's download calls it.
        texts: columns of its one text or two.
        label: column of the label.
        classes: what stands in that column, and in a submission; none where it is a number of points.
        metric: the paper's.
        also: further ones that the benchmark reports.
        headless: columns of texts and label, from 0, where the first line is no header.
        matched: does the development set come in two, matched and mismatched?
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
        """Part -> the names its file may have. The official development set is what is tested on."""
        ends = ("_matched", "_mismatched") if self.matched else ("",)
        found: dict[str, tuple[str, ...]] = {"train": ("train.tsv", "train_subset.tsv")}
        for end in ends:
            part = "test" if end != "_mismatched" else "mismatched"
            found[part] = (f"dev{end}.tsv", f"dev{end}_subset.tsv")
            found[PREDICT + end.removeprefix("_matched")] = (f"test{end}.tsv",)
        return found

    @property
    def submissions(self) -> dict[str, str]:
        """Part -> the file the benchmark wants its answers in."""
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
    """What a file holds.

    Args:
        texts: one list, or two of the same length.
        labels: class of each row, or points; -1 where the file has no labels.
        indices: of each row, as the file counts them; empty where there are labels.
        skipped: bad lines that were left out in reading.
    """

    texts: tuple[list[str], ...]
    labels: list[int] | list[float]
    indices: list[int]
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.labels)


def task_named(name: str) -> GlueTask:
    """A task by its name, or by that of the benchmark: "sts", "STS-B".

    Raises:
        DataError: there is none.
    """
    plain = name.lower()
    for task in TASKS.values():
        if plain in (task.name, task.folder.lower()):
            return task
    near = get_close_matches(plain, TASKS, 1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    raise DataError(f"GLUE task {name!r} is unknown; {meant}give --task with one of {', '.join(TASKS)}")


def find_glue(data: Path, task: GlueTask) -> dict[str, Path]:
    """The file of each part that is there; train and the official development set must be.

    Args:
        data: the folder of the benchmark, or of the task.
        task: which.

    Raises:
        DataError: a file is missing.
    """
    folder = data / task.folder if (data / task.folder).is_dir() else data
    found = {}
    for part, names in task.files.items():
        path = next((path for name in names if (path := find_file(folder, name))), None)
        if path is not None:
            found[part] = path
        elif part in ("train", "test"):
            told = " or ".join(names)
            raise DataError(f"{folder}: no {told} of GLUE task {task.name!r}; files may be plain, .xz or .gz")
    return found


def read_glue(path: str | Path, task: GlueTask, *, labelled: bool = True, limit: int = 20) -> GlueRows:
    """The rows of a file.

    Args:
        path: plain, gzip or xz.
        task: whose file it is.
        labelled: false for the benchmark's test files. Of these no line may be bad: a submission has an answer for
            every row.
        limit: bad lines that may be skipped.

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
                bad.skip(number, f"nothing in column {empty[0]!r}")
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
    """A pair of at most so many pieces: while it has more, the longer text loses its last, the second of equals.

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
    """Which full stops the training texts seem to have lost, so that the others can lose them too.

    Args:
        train: texts to train on.
        tested: texts to test on.

    Returns:
        "all" where no training text has any, "final" where fewer than one in a hundred ends with one, "keep" where
        neither is so, or where fewer than one in twenty of the texts to test on has any.
    """
    if not train or sum("." in text for text in tested) < len(tested) / 20:
        return "keep"
    if not any("." in text for text in train):
        return "all"
    return "final" if sum(text.endswith(".") for text in train) < len(train) / 100 else "keep"


def without_stops(text: str, which: str) -> str:
    """A text without its full stops; whatever it is, something stays.

    Args:
        text: any.
        which: "all", "final" or "keep".
    """
    if which == "keep":
        return text
    bare = text.replace(".", "") if which == "all" else text.rstrip(". ")
    return bare.strip() or text


def _columns(header: Sequence[str], task: GlueTask, labelled: bool) -> list[str | int]:
    """Texts, then the label or, of a test file, what it counts its rows by."""
    if task.headless and task.texts[0] not in header:
        return list(task.headless if labelled else task.headless[:-1])
    counted = [name for name in ("index", "id") if name in header][:1]
    return [*task.texts, *([task.label] if labelled else counted)]


def _label(value: str, task: GlueTask) -> tuple[int | float, str]:
    """The label, and what is wrong with it ("" where nothing is)."""
    value = value.strip()
    if task.classes:
        if value in task.classes:
            return task.classes.index(value), ""
        return -1, f"label {value!r} is none of {', '.join(task.classes)}"
    try:
        points = float(value)
    except ValueError:
        points = float("nan")
    return points, "" if 0 <= points <= MOST else f"score {value!r} is no number from 0 to {MOST:g}"


def _index(path: str | Path, number: int, values: list[str], expected: int) -> int:
    if not values:
        return expected
    if not values[0].strip().isdecimal() or len(values[0]) > _DIGITS:
        raise DataError(f"{path}, line {number}: {values[0][:40]!r} is no number of a row")
    return int(values[0])
