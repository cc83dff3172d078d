"""The README's table of results, written from the files below results/ and from nothing else.

    python -m studies.headline            # write the block between the two comments of README.md
    python -m studies.headline --check    # say whether the block and the results agree

A result that is not there is a row that is not there. A new study is one more line of `STUDIES`, where its JSON has
rows as `repulsive.lab.engine.tables` makes them, or one more reader in `LINES`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repulsive.lab.paper.published import published

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- headline: begin; written by studies/headline.py -->"
END = "<!-- headline: end -->"


@dataclass(frozen=True)
class Study:
    """Files of tables of methods, one for each data set.

    Args:
        folder: below results/.
        metric: that is shown.
        name: of the metric.
        scale: what it is multiplied by.
        ours: labels of the row that is compared with the first, the first of them that is there; a row of the same
            label and ", as published" has a line of its own.
        paper: table of the paper, and its rows of both.
    """

    folder: str
    metric: str
    name: str
    scale: float = 1.0
    ours: tuple[str, ...] = ("SVGD", "GW + RMA", "RMA")
    paper: tuple[str, str, str] = ("", "", "")


BENCHES = ("bench-cuda.json", "bench-cuda-4096.json")  # a later one has the last word on a batch size
STUDIES = (
    Study("classification", "accuracy", "accuracy (%)", 100.0, paper=("table1", "svgd", "ma")),
    Study("translation", "bleu", "BLEU", paper=("table2", "svgd", "ma")),
    Study("graphs", "bleu", "BLEU-4", paper=("table4", "rma", "gw")),
)


def read(path: Path) -> Any:
    """A JSON file; None where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


# -- what repulsion did to results ------------------------------------------------------------------------------------


def quality(results: Path) -> list[str]:
    """A row for each data set: plain attention, SVGD, their difference and the paper's."""
    rows = []
    for study in STUDIES:
        for path in sorted((results / study.folder).glob("*.json")):
            found = _rows(read(path))
            if found:
                rows += _compared(study, path.stem, found)
    rows += _glue(read(results / "pretraining" / "glue.json"))
    if not rows:
        return []
    head = ["data", "metric", "plain attention", "SVGD", "difference [95 %]", "seeds", "the paper's difference"]
    return ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head), *rows]


def _rows(table: Any) -> list[dict[str, Any]]:
    """Rows of a table, or of its test set; a file of anything else has none."""
    if isinstance(table, dict) and "rows" not in table:
        table = table.get("test")
    return list(table["rows"]) if isinstance(table, dict) and isinstance(table.get("rows"), list) else []


def _compared(study: Study, data: str, rows: list[dict[str, Any]]) -> list[str]:
    by_label = {row["label"]: row for row in rows}
    label = next((label for label in study.ours if label in by_label), "")
    shown = {data: label, f"{data}, the rule as published": f"{label}, as published"}
    known = {name: by_label[which] for name, which in shown.items() if _has(study, by_label, which)}
    return [_line(study, name, rows[0], ours) for name, ours in known.items()]


def _has(study: Study, rows: Mapping[str, dict[str, Any]], label: str) -> bool:
    return label in rows and study.metric in rows[label]["against"]


def _line(study: Study, data: str, plain: dict[str, Any], ours: dict[str, Any]) -> str:
    means = [study.scale * row["cells"][study.metric]["mean"] for row in (plain, ours)]
    seen = ours["against"][study.metric]
    told, printed = _difference(seen, study.scale), _printed(study, data.split(",")[0])
    cells = [data, study.name, *(f"{mean:.2f}" for mean in means), told, str(seen["seeds"]), printed]
    return "| " + " | ".join(cells) + " |"


def _printed(study: Study, data: str) -> str:
    table, ours, plain = study.paper
    first, second = (published().value(table, data, row, study.metric) for row in (ours, plain))
    return "" if first is None or second is None else f"{first - second:+.2f}"


def _glue(table: Any) -> list[str]:
    """Of fine-tuning the mean over all tasks, where several pre-trainings were compared."""
    if not isinstance(table, dict) or "svgd" not in table.get("against", {}):
        return []
    seen = table["against"]["svgd"].get("mean")
    means = [table["systems"][name].get("means", {}).get("mean", {}) for name in ("ma", "svgd")]
    if not seen or seen["low"] is None or not all(means):
        return []
    shown = [f"{sum(each.values()) / len(each):.2f}" for each in means]
    first, second = (published().value("table3", "glue", name, "mean") for name in ("svgd", "ma"))
    printed = "" if first is None or second is None else f"{first - second:+.2f}"
    cells = ["GLUE, the rule as published", "mean", *shown, _difference(seen, 1.0), str(seen["seeds"]), printed]
    return ["| " + " | ".join(cells) + " |"]


def _difference(seen: Mapping[str, float], scale: float) -> str:
    return "{:+.2f} [{:+.2f}, {:+.2f}]".format(*(scale * seen[name] for name in ("difference", "low", "high")))


# -- what it costs, and what it knows ---------------------------------------------------------------------------------


def _step(results: Path) -> list[str]:
    files = [read(results / "bench" / name) for name in BENCHES]
    if files[0] is None:
        return []
    bench, steps = files[0], {tokens: seen for file in files if file for tokens, seen in file["steps"].items()}
    printed = published().value("table2", "iwslt14", "svgd", "time")
    lines = []
    for tokens, variants in steps.items():
        if "all layers" in variants:
            seen = variants["all layers"]
            told = f"{seen['ratio']:.3f} [{seen['low']:.3f}, {seen['high']:.3f}]"
            lines.append(f"step with repulsion over a plain one, {int(tokens):,} tokens | {told} | {printed}")
    update = bench.get("update", {})
    if "update_device_seconds" in update:
        lines.append(f"update of {update['numbers']:,} numbers | {1000 * update['update_device_seconds']:.3f} ms | ")
    return lines


def _speed(results: Path) -> list[str]:
    speed = read(results / "translation" / "speed" / "speed.json")
    if speed is None:
        return []
    lines = []
    ours = speed.get("train", {}).get("16384 SVGD")
    other = speed.get("marian", {}).get("16384 Seq2SeqTrainer")
    if ours and other:
        a, b = ours["tokens_per_second"], other["tokens_per_second"]
        what = "target tokens a second, training with repulsion; transformers' trainer without"
        lines.append(f"{what} | {a:,.0f}; {b:,.0f} | ")
    decode, generate = (speed.get(name, {}).get("all") for name in ("decode", "generate"))
    if decode and generate:
        what = f"{decode['sentences']:,} sentences decoded, beam {decode['beam']}; transformers' `generate`"
        lines.append(f"{what} | {decode['seconds']:.2f} s; {generate['seconds']:.2f} s | ")
    return lines


def _pretraining(results: Path) -> list[str]:
    """Of the batches that both were measured with."""
    speed, lines = read(results / "electra" / "speed" / "speed.json") or {}, []
    for name, ours in speed.get("train", {}).items():
        other = speed.get("trainer", {}).get(name.replace(" SVGD", " Trainer"))
        if name.endswith(" SVGD") and other:
            what = f"tokens a second, ELECTRA with {name.split()[0]} sequences a step; transformers' `Trainer` without"
            lines.append(f"{what} | {ours['tokens_per_second']:,.0f}; {other['tokens_per_second']:,.0f} | ")
    return lines


def _graphs(results: Path) -> list[str]:
    speed, lines = read(results / "graphs" / "speed" / "speed.json") or {}, []
    if "batched" in speed.get("train", {}):
        times = speed["train"]["batched"]["times"]
        lines.append(f"GraphWriter in batches over a loop over graphs, training | {times:.0f} times as fast | ")
    for seen in speed.get("decode", {}).values():
        if isinstance(seen, dict) and "seconds" in seen:
            what = f"texts of {seen['words']} words about {seen['graphs']:,} graphs, beam {seen['beam']}"
            lines.append(f"{what} | {seen['seconds']:.2f} s | ")
    return lines


def _survey(results: Path) -> list[str]:
    lines = []
    for name in ("transformers", "timm"):
        survey = read(results / "survey" / f"{name}.json")
        if survey is None:
            continue
        counts = survey["counts"]
        whole = counts.get("table", 0) + counts.get("inferred", 0)
        with_heads = whole + sum(counts.get(status, 0) for status in ("partly", "missed", "refused", "failed"))
        what = f"architectures of {name} whose heads are found and proved throughout"
        lines.append(f"{what} | {whole} of {with_heads} | ")
    return lines


LINES: tuple[Callable[[Path], list[str]], ...] = (_step, _speed, _pretraining, _graphs, _survey)


def costs(results: Path) -> list[str]:
    """Further numbers, one a row."""
    rows = [f"| {line.strip()} |" for reader in LINES for line in reader(results)]
    return ["| | measured | the paper |", "| --- | --- | --- |", *rows] if rows else []


# -- the block --------------------------------------------------------------------------------------------------------


def block(results: Path) -> str:
    """All that stands between the two comments."""
    tables = ["\n".join(lines) for lines in (quality(results), costs(results)) if lines]
    return "\n\n".join(tables) if tables else "Nothing has been measured yet."


def replaced(readme: str, text: str) -> str:
    """The README with a new block.

    Raises:
        ValueError: it has no place for one.
    """
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise ValueError(f"README.md needs the line {BEGIN!r} and after it {END!r}, once each")
    before, rest = readme.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where the block is out of date")
    asked = parser.parse_args(words)
    have = asked.readme.read_text(encoding="utf-8")
    wanted = replaced(have, block(asked.results))
    if asked.check:
        print("up to date" if have == wanted else "out of date: run python -m studies.headline")
        return int(have != wanted)
    asked.readme.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
