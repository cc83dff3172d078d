"""Toy files for the GLUE tasks in the official layout, and a vocabulary for them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

PIECES = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", ",", "good", "bad", "##ly", "yes", "no"]
WORDS = [f"w{i}" for i in range(20)]
COLUMNS: dict[str, tuple[str, str | None]] = {
    "cola": ("CoLA", None),
    "sst": ("SST-2", "sentence\tlabel"),
    "mrpc": ("MRPC", "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"),
    "sts": ("STS-B", "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore"),
    "qqp": ("QQP", "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"),
    "mnli": (
        "MNLI",
        "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
        "sentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label",
    ),
    "qnli": ("QNLI", "index\tquestion\tsentence\tlabel"),
    "rte": ("RTE", "index\tsentence1\tsentence2\tlabel"),
}
TEXTS = ("sentence", "#1 String", "question1", "sentence1", "question"), ("#2 String", "question2", "sentence2")
LABELS = ("label", "Quality", "score", "is_duplicate", "gold_label")
CLASSES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("cola", "sst", "mrpc", "qqp"), ("0", "1")),
    **dict.fromkeys(("qnli", "rte"), ("entailment", "not_entailment")),
    "mnli": ("contradiction", "entailment", "neutral"),
}


def write_vocabulary(folder: Path) -> Path:
    """Write `vocab.txt` with all words of the toy rows."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in PIECES + WORDS))
    return folder / "vocab.txt"


def rows_of(task: str, count: int, seed: int = 0) -> Iterator[tuple[str, str, str]]:
    """Generate rows (first, second, label); words such as "good" and "bad" in the last text determine the label."""
    draw = random.Random(f"{task}/{seed}")
    for _ in range(count):
        words = [draw.choice(WORDS) for _ in range(draw.randint(2, 6))]
        first = " ".join(draw.choice(WORDS) for _ in range(draw.randint(2, 6)))
        if task == "sts":
            points = draw.randint(0, 5)
            yield first, " ".join(["good"] * points + ["bad"] * (5 - points)), f"{points}.000"
        else:
            number = draw.randrange(len(CLASSES[task]))
            yield first, " ".join([*words, ("good", "bad", "yes")[number]]), CLASSES[task][number]


def lines_of(task: str, rows: Iterable[tuple[str, str, str]], labelled: bool = True) -> list[str]:
    """Format the lines of a file, with a header if the task has one."""
    header = COLUMNS[task][1]
    if task == "cola" and labelled:
        return [f"gj04\t{label}\t\t{second}" for _, second, label in rows]
    names = (header or "index\tsentence").split("\t")
    if not labelled:
        names = [name for name in names if name not in LABELS and not name.startswith("label")]
        names = names if names[0] in ("index", "id") else ["index", *names]
    lines = ["\t".join(names)]
    single = task in ("cola", "sst")
    for number, (first, second, label) in enumerate(rows):
        values = []
        for name in names:
            if name in ("index", "id"):
                values.append(str(number))
            elif name == "sentence" and task == "qnli":
                values.append(second)
            elif name in TEXTS[0]:
                values.append(second if single else first)
            elif name in TEXTS[1]:
                values.append(second)
            else:
                values.append(label if name in LABELS else "none")
        lines.append("\t".join(values))
    return lines


def write_task(folder: Path, task: str, sizes: Sequence[int] = (80, 24, 9)) -> Path:
    """Write the training, development and unlabelled test sets; MNLI has two development sets and two test sets."""
    place = folder / COLUMNS[task][0]
    place.mkdir(parents=True, exist_ok=True)
    ends = ("_matched", "_mismatched") if task == "mnli" else ("",)
    files = {"train": (sizes[0], True)}
    for end in ends:
        files |= {f"dev{end}": (sizes[1], True), f"test{end}": (sizes[2], False)}
    for seed, (name, (count, labelled)) in enumerate(files.items()):
        text = "\n".join(lines_of(task, rows_of(task, count, seed), labelled)) + "\n"
        (place / f"{name}.tsv").write_text("\ufeff" + text if task == "mrpc" else text)
    return folder
