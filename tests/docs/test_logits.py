"""Numbers that the two pages on logits state are those of the tables they link to."""

import json
import lzma
import re
import statistics
from pathlib import Path

from repulsive.metrics import student

ROOT = Path(__file__).parents[2]
PAGE, STUDY = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("logits.md", "logits-study.md"))
INTERVAL = re.compile(r"[+-]0\.\d{4} \[[+-]0\.\d{4}, [+-]0\.\d{4}\]")
# Experiments of results/logits, and their titles in the table of the study. It uses tiny-early in another section.
EXPERIMENTS = {
    "tiny": "tiny: 4 layers, 4 heads, width 128",
    "tiny-heads2": "2 heads",
    "tiny-heads8": "8 heads",
    "tiny-heads16": "16 heads",
    "tiny-grouped": "8 heads, 2 key-value heads",
    "tiny-4mb": "4 MB of text, 8 epochs",
    "tiny-long": "Wikipedia, 4 x the steps",
    "small": "small: 6 layers, 8 heads, width 256",
    "tiny-tied": "tiny, tied embeddings",
}


def rows_under(header: str, text: str) -> dict[str, list[str]]:
    """Read the Markdown table whose header starts with a text: first cell -> the other cells, without bold."""
    lines = text[text.index(f"| {header} |") :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").replace("**", "").split("|")] for line in lines]
    return {first: rest for first, *rest in cells}


def results() -> dict[str, list[str]]:
    """Read the table of all experiments: name -> its cells."""
    rows = rows_under("experiment", (ROOT / "results" / "logits" / "README.md").read_text(encoding="utf-8"))
    return {re.match(r"\[([\w-]+)\]", first)[1]: rest for first, rest in rows.items()}


def test_every_interval_is_in_a_table():
    stated = INTERVAL.findall(PAGE + STUDY)
    tables = " ".join(file.read_text(encoding="utf-8") for file in (ROOT / "results" / "logits").glob("*.md"))
    assert len(stated) > 15
    assert [interval for interval in stated if interval not in tables] == []


def test_the_table_of_experiments_is_that_of_the_results():
    stated, measured = rows_under("experiment", STUDY), results()
    assert list(stated) == list(EXPERIMENTS.values())
    assert set(measured) - set(EXPERIMENTS) == {"tiny-early"}
    for name, title in EXPERIMENTS.items():
        assert stated[title] == measured[name], name


def test_the_range_of_effects_is_that_of_all_experiments():
    effects = [100 * float(cells[1].split()[0]) / float(cells[0]) for cells in results().values()]
    assert len(effects) == 10 and max(effects) < 0
    row = rows_under("training", PAGE)[
        "small byte-level language models from scratch (4 to 6 layers, width 128 and 256)"
    ]
    assert row[0] == f"{max(effects):.1f} % to {min(effects):.1f} %, in all ten experiments"


def test_the_study_states_effects_with_and_without_tied_embeddings():
    effects = {name: -100 * float(cells[1].split()[0]) / float(cells[0]) for name, cells in results().items()}
    tied = effects.pop("tiny-tied")
    assert f"With tied embeddings the gain is small ({tied:.1f} %)" in STUDY
    assert f"it is larger ({min(effects.values()):.1f} to {max(effects.values()):.1f} %)" in STUDY


def test_effects_of_the_rule_itself_are_those_of_its_study():
    """The page rounds; each number may differ by half of its last digit."""
    study = (ROOT / "results" / "default_rule" / "README.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in study.splitlines() if line.startswith("| ")]
    intervals = {(system, rule): re.findall(r"[+-][\d.]+(?=%)", change) for system, rule, _, _, change, *_ in rows}
    translation = (ROOT / "results" / "logits" / "translation.md").read_text(encoding="utf-8")
    of_arms = {}
    for part in translation.split("\n## ")[1:]:
        for arm, change in re.findall(r"^\| (\w+) \| 4 \| .*? \| ([+-][^|]*%\]) \|", part, re.MULTILINE):
            of_arms[part.split("\n")[0], arm] = re.findall(r"[+-][\d.]+(?= %)", change)
    measured = [
        intervals["Language model, current rules", "logits (default: first 500 steps)"],
        intervals["Language model, 25M parameters", "logits (default: first 500 steps)"],
        intervals["ELECTRA-small, 45M tokens", "logits (default: first 500 steps)"],
        intervals["Translation, Multi30k", "logits"],
        *(of_arms[data, "logits"] for data in ("multi30k", "europarl-160k")),
        intervals["BERT fine-tuning, SST-2", "logits, all steps"],
        intervals["BERT fine-tuning, QQP", "logits, all steps"],
        *(of_arms[data, arm] for data in ("multi30k", "europarl-160k") for arm in ("attraction", "decay")),
    ]
    table = PAGE[PAGE.index("| training |") : PAGE.index("So the gain is that of")]
    stated = re.findall(r"([+-][\d.]+) % \[([+-][\d.]+) %, ([+-][\d.]+) %\]", table)
    assert len(stated) == len(measured) == 12
    for page, result in zip(stated, measured, strict=True):
        for text, number in zip(page, result, strict=True):
            half = 0.5 * 10.0 ** -len(text.partition(".")[2])
            assert abs(float(text) - float(number)) <= half + 1e-9


def test_early_stopping_is_that_of_the_raw_results():
    with lzma.open(ROOT / "results" / "logits" / "raw" / "tiny-4mb.jsonl.xz", "rt") as file:
        rows = [json.loads(line) for line in file]
    lowest = {(row["arm"], row["seed"]): min(row["log"]["dev"]) for row in rows}
    gains = [lowest["repulsion 0.1", seed] - lowest["plain", seed] for seed in range(5)]
    low, high = student.interval(gains)
    assert all(lowest[row["arm"], row["seed"]] in row["log"]["dev"][14:16] for row in rows)
    assert f"minus plain is {statistics.fmean(gains):+.4f} [{low:+.4f}, {high:+.4f}]" in STUDY

    def order(losses):
        return sorted({row["arm"] for row in rows}, key=lambda arm: sum(losses[arm, seed] for seed in range(5)))

    assert order(lowest) == order({(row["arm"], row["seed"]): row["loss"] for row in rows})
