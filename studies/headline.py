"""Write the tables of results/headline.md from the files in results/.

    python -m studies.headline            # write the block between the two comments of results/headline.md
    python -m studies.headline --check    # report whether the block agrees with the results

A missing result file gives no row. To add a study, add a line to `STUDIES` if its JSON has rows as
`repulsive.lab.engine.tables` makes them; otherwise add a reader to `READERS`.
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
from repulsive.safety.markdown import format_table

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- headline: begin; written by studies/headline.py -->"
END = "<!-- headline: end -->"
Cells = list[str]


@dataclass(frozen=True)
class Study:
    """A folder of tables of methods, one file for each dataset.

    Args:
        folder: below results/.
        metric: key of the shown metric.
        name: of the metric.
        scale: factor on the metric.
        ours: possible labels of the row that is compared with the first row; the first one that exists is used. A row
            with that label and ", as published" is shown separately.
        paper: table of the paper, and its rows for ours and for plain attention.
    """

    folder: str
    metric: str
    name: str
    scale: float = 1.0
    ours: tuple[str, ...] = ("SVGD", "GW + RMA", "RMA")
    paper: tuple[str, str, str] = ("", "", "")


BENCHES = ("bench-cuda.json", "bench-cuda-4096.json")  # later files replace the numbers of a batch size
STUDIES = (
    Study("classification", "accuracy", "accuracy (%)", 100.0, paper=("table1", "svgd", "ma")),
    Study("translation", "bleu", "BLEU", paper=("table2", "svgd", "ma")),
    Study("graphs", "bleu", "BLEU-4", paper=("table4", "rma", "gw")),
)


def read(path: Path) -> Any:
    """Read a JSON file; None if it does not exist."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


# -- effect on results ------------------------------------------------------------------------------------------------


def quality(results: Path) -> str:
    """Format a table with rows for each dataset: plain attention, SVGD, their difference, and the paper's."""
    rows = []
    for study in STUDIES:
        for path in sorted((results / study.folder).glob("*.json")):
            if by_method := _method_rows(read(path)):
                rows += _compare(study, path.stem, by_method)
        if study.folder == "classification":
            second = read(results / study.folder / "second_round" / "paper_sizes.json") or {}
            first = read(results / study.folder / "paper_sizes.json") or {}
            rows += _paper_sizes(study, first | second)
            rows += _paper_sizes(study, {data: own for data, own in first.items() if data == "age"}, ", first round")
    rows += _glue(read(results / "pretraining" / "glue.json"))
    head = ["dataset", "metric", "plain attention", "SVGD", "difference [95 % CI]", "seeds", "the paper's difference"]
    return format_table(head, rows) if rows else ""


def _method_rows(table: Any) -> list[dict[str, Any]]:
    """Rows of a table, or of its test set; empty for any other file."""
    if isinstance(table, dict) and "rows" not in table:
        table = table.get("test")
    return list(table["rows"]) if isinstance(table, dict) and isinstance(table.get("rows"), list) else []


def _compare(study: Study, data: str, rows: list[dict[str, Any]]) -> list[Cells]:
    by_label = {row["label"]: row for row in rows}
    label = next((label for label in study.ours if label in by_label), "")
    labels = {data: label, f"{data}, the rule as published": f"{label}, as published"}
    return [
        _quality_row(study, name, rows[0], by_label[of_row])
        for name, of_row in labels.items()
        if of_row in by_label and study.metric in by_label[of_row]["against"]
    ]


def _quality_row(study: Study, data: str, plain: dict[str, Any], ours: dict[str, Any]) -> Cells:
    means = [study.scale * row["cells"][study.metric]["mean"] for row in (plain, ours)]
    compared = ours["against"][study.metric]
    difference, paper = _difference(compared, study.scale), _paper_difference(study, data.split(",")[0])
    return [data, study.name, *(f"{mean:.2f}" for mean in means), difference, str(compared["seeds"]), paper]


def _paper_sizes(study: Study, summaries: Mapping[str, Any], which: str = "") -> list[Cells]:
    """Rows of SVGD and the cosine kernel at the paper's sizes, against plain attention and at the same settings."""
    rows = []
    for data, summary in sorted(summaries.items()):
        arms = summary["arms"]
        for arm, name in (("svgd", ""), ("cosine-smoothing", ", cosine kernel")):
            if not arms.get(arm, {}).get("against_plain"):
                continue
            against = [("", arms["ma"], arms[arm]["against_plain"])]
            against += [
                (", plain at the same settings", control, control["of"][arm])
                for key, control in summary["controls"].items()
                if key.startswith("ma@") and control["of"].get(arm)
            ]
            for suffix, plain, differences in against:
                compared = differences[study.metric]
                means = [study.scale * row["test"][study.metric]["mean"] for row in (plain, arms[arm])]
                cells = [f"{mean:.2f}" for mean in means] + [_difference(compared, study.scale), str(compared["seeds"])]
                paper = "" if name else _paper_difference(study, data)
                rows.append([f"{data}, the paper's sizes{which}{name}{suffix}", study.name, *cells, paper])
    return rows


def _paper_difference(study: Study, data: str) -> str:
    table, ours, plain = study.paper
    first, second = (published().value(table, data, row, study.metric) for row in (ours, plain))
    return "" if first is None or second is None else f"{first - second:+.2f}"


def _glue(table: Any) -> list[Cells]:
    """The mean over all GLUE tasks, if several pre-trainings were compared."""
    if not isinstance(table, dict) or "svgd" not in table.get("against", {}):
        return []
    compared = table["against"]["svgd"].get("mean")
    means = [table["systems"][name].get("means", {}).get("mean", {}) for name in ("ma", "svgd")]
    if not compared or compared["low"] is None or not all(means):
        return []
    shown = [f"{sum(each.values()) / len(each):.2f}" for each in means]
    first, second = (published().value("table3", "glue", name, "mean") for name in ("svgd", "ma"))
    paper = "" if first is None or second is None else f"{first - second:+.2f}"
    difference, seeds = _difference(compared, 1.0), compared["seeds"]
    trained = compared.get("pretrainings", seeds)  # those with the same seed are not two seeds
    counted = str(seeds) if trained == seeds else f"{seeds} ({trained} pre-trainings)"
    return [["GLUE, the rule as published", "mean", *shown, difference, counted, paper]]


def _difference(compared: Mapping[str, float], scale: float) -> str:
    return "{:+.2f} [{:+.2f}, {:+.2f}]".format(*(scale * compared[name] for name in ("difference", "low", "high")))


# -- cost, speed and coverage -----------------------------------------------------------------------------------------


def _step_times(results: Path) -> list[Cells]:
    files = [read(results / "bench" / name) for name in BENCHES]
    if files[0] is None:
        return []
    steps = {tokens: variants for file in files if file for tokens, variants in file["steps"].items()}
    paper = published().value("table2", "iwslt14", "svgd", "time")
    rows = []
    for tokens, variants in steps.items():
        if "all layers" in variants:
            time = variants["all layers"]
            ratio = f"{time['ratio']:.3f} [{time['low']:.3f}, {time['high']:.3f}]"
            what = f"step time with repulsion relative to plain attention, {int(tokens):,} tokens"
            rows.append([what, ratio, str(paper)])
    update = files[0].get("update", {})
    if "update_device_seconds" in update:
        milliseconds = f"{1000 * update['update_device_seconds']:.3f} ms"
        rows.append([f"update of {update['numbers']:,} weights", milliseconds, ""])
    return rows


def _translation_speed(results: Path) -> list[Cells]:
    speed = read(results / "translation" / "speed" / "speed.json")
    if speed is None:
        return []
    rows = []
    ours = speed.get("train", {}).get("16384 SVGD")
    other = speed.get("marian", {}).get("16384 Seq2SeqTrainer")
    if ours and other:
        what = "target tokens per second in training: with repulsion; transformers' `Seq2SeqTrainer` without"
        rows.append([what, f"{ours['tokens_per_second']:,.0f}; {other['tokens_per_second']:,.0f}", ""])
    decode, generate = (speed.get(name, {}).get("all") for name in ("decode", "generate"))
    if decode and generate:
        what = f"decoding {decode['sentences']:,} sentences, beam {decode['beam']}: ours; transformers' `generate`"
        rows.append([what, f"{decode['seconds']:.2f} s; {generate['seconds']:.2f} s", ""])
    return rows


def _pretraining_speed(results: Path) -> list[Cells]:
    """One row for each batch size that both systems were measured with."""
    speed, rows = read(results / "electra" / "speed" / "speed.json") or {}, []
    for name, ours in speed.get("train", {}).items():
        other = speed.get("trainer", {}).get(name.replace(" SVGD", " Trainer"))
        if name.endswith(" SVGD") and other:
            step = f"ELECTRA with {name.split()[0]} sequences per step"
            what = f"tokens per second, {step}: with repulsion; transformers' `Trainer` without"
            rows.append([what, f"{ours['tokens_per_second']:,.0f}; {other['tokens_per_second']:,.0f}", ""])
    return rows


def _graph_speed(results: Path) -> list[Cells]:
    speed, rows = read(results / "graphs" / "speed" / "speed.json") or {}, []
    if "batched" in speed.get("train", {}):
        times = speed["train"]["batched"]["times"]
        rows.append(["training GraphWriter in batches, not one graph at a time", f"{times:.0f} times as fast", ""])
    for decode in speed.get("decode", {}).values():
        if isinstance(decode, dict) and "seconds" in decode:
            what = f"writing {decode['words']} words about each of {decode['graphs']:,} graphs, beam {decode['beam']}"
            rows.append([what, f"{decode['seconds']:.2f} s", ""])
    return rows


def _survey(results: Path) -> list[Cells]:
    rows = []
    for name in ("transformers", "timm"):
        survey = read(results / "survey" / f"{name}.json")
        if survey is None:
            continue
        counts = survey["counts"]
        proved = counts.get("table", 0) + counts.get("inferred", 0)
        with_heads = proved + sum(counts.get(status, 0) for status in ("partly", "missed", "refused", "failed"))
        rows.append([f"architectures of {name} with all heads found and proved", f"{proved} of {with_heads}", ""])
    return rows


READERS: tuple[Callable[[Path], list[Cells]], ...] = (
    _step_times,
    _translation_speed,
    _pretraining_speed,
    _graph_speed,
    _survey,
)


def costs(results: Path) -> str:
    """Format a table of further numbers, one row each."""
    rows = [cells for reader in READERS for cells in reader(results)]
    return format_table(["quantity", "measured", "the paper"], rows) if rows else ""


# -- the block --------------------------------------------------------------------------------------------------------


def block(results: Path) -> str:
    """The text between the two comments."""
    tables = [table for table in (quality(results), costs(results)) if table]
    return "\n\n".join(tables) if tables else "There are no results yet."


def replaced(page: str, text: str) -> str:
    """The page with a new block.

    Raises:
        ValueError: the page lacks one of the two comments.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"the page needs the line {BEGIN!r} and after it {END!r}, once each")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="folder of results")
    parser.add_argument("--page", type=Path, default=ROOT / "results" / "headline.md", help="file to change")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the block is out of date")
    arguments = parser.parse_args(words)
    current = arguments.page.read_text(encoding="utf-8")
    expected = replaced(current, block(arguments.results))
    if arguments.check:
        print("up to date" if current == expected else "out of date: run python -m studies.headline")
        return int(current != expected)
    arguments.page.write_text(expected, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
