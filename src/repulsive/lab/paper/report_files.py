"""Write reports as Markdown and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from repulsive.lab.engine.files import write_text
from repulsive.lab.engine.runs import versions
from repulsive.lab.paper.datasets import DATASETS, PreparedData
from repulsive.lab.paper.mismatch import Mismatch
from repulsive.lab.paper.published import published
from repulsive.lab.paper.report import Number, Report, Row, label_of
from repulsive.lab.paper.verdicts import OUTCOMES, Finding
from repulsive.metrics.compare import Comparison
from repulsive.safety.markdown import format_table

DIGITS = {"accuracy": 2, "dist": 3, "time": 3, "overlap": 3, "ece15": 3, "oe15": 3, "best": 0, "foreign entropy": 3}
METRIC_NAMES = {
    "bleu": "BLEU",
    "sacrebleu": "sacreBLEU",
    "accuracy": "accuracy (%)",
    "dist": "Dist",
    "time": "step time / MA",
    "foreign entropy": "entropy, out-of-domain",
    "own entropy": "entropy, in-domain",
    "heads better away": "heads whose removal helps",
    "error at every number": "error at every number of heads",
}
GRAPH_METRIC_NAMES = {"bleu": "BLEU-4"}


def write(report: Report, out: Path) -> list[Path]:
    """Write `ID.md` and `ID.json` into a folder.

    Raises:
        RunError: a file cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{report.id}.md", out / f"{report.id}.json"]
    write_text(paths[0], as_markdown(report) + "\n")
    write_text(paths[1], json.dumps(as_data(report), indent=1) + "\n")
    return paths


def as_markdown(report: Report) -> str:
    """Format a report as a Markdown page."""
    about = published().about(report.id)
    parts = [f"# {report.id}: {report.title}", f"The paper's {report.source}{f', {about}' if about else ''}."]
    if report.data:
        parts.append("\n".join(_data_line(data) for data in report.data))
    for name in dict.fromkeys(row.dataset for row in report.rows):
        parts.append(_number_table([row for row in report.rows if row.dataset == name], name, report.counted))
    parts += report.texts
    if report.rows:
        parts.append(
            "Brackets hold 95 % confidence intervals: for means over seeds by Student's t, for times and shares by "
            "resampling."
        )
    if report.findings:
        parts.append("## Claims\n\n" + _claim_table(report.findings))
    if report.notes:
        parts.append("## Notes on the paper\n\n" + "\n".join(f"- {note}" for note in report.notes))
    if report.files:
        parts.append("Written: " + ", ".join(str(path) for path in report.files))
    return "\n\n".join(parts)


def as_data(report: Report) -> dict[str, Any]:
    """Convert a report to plain values for JSON, with numbers at full precision."""
    rows = [
        {"data": row.dataset, "method": row.method, "label": row.label, "seeds": row.seeds}
        | {"runs": row.folder and str(row.folder), "numbers": _numbers_as_data(row)}
        for row in report.rows
    ]
    return {
        "id": report.id,
        "title": report.title,
        "source": report.source,
        "versions": versions(),
        "data": [_prepared_as_data(data) for data in report.data],
        "rows": rows,
        "claims": [_finding_as_data(finding) for finding in report.findings],
        "notes": report.notes,
        "files": [str(path) for path in report.files],
    }


def summary(reports: Sequence[Report]) -> str:
    """Format a table of verdict counts, one row for each report."""
    rows = [[report.id, str(len(report.findings)), *map(str, count_verdicts(report))] for report in reports]
    return format_table(["table or figure", "claims", *OUTCOMES.values()], rows)


def count_verdicts(report: Report) -> list[int]:
    """Count the claims of a report with each outcome, in the order of `OUTCOMES`."""
    return [sum(finding.outcome == outcome for finding in report.findings) for outcome in OUTCOMES]


def _data_line(data: PreparedData) -> str:
    sizes = ", ".join(f"{count:,} {part}" for part, count in data.sizes.items())
    state = f"**not the paper's data**: {data.mismatch.reason}" if data.mismatch else "sizes as in the paper"
    return f"- {data.name} ({data.folder}): {sizes}; {state}"


def _number_table(rows: Sequence[Row], name: str, counted: str) -> str:
    metrics = list(dict.fromkeys(metric for row in rows for metric in row.numbers))
    names = METRIC_NAMES | (GRAPH_METRIC_NAMES if any("ROUGE-L" in row.numbers for row in rows) else {})
    printed = [m for m in metrics if any(m in row.numbers and row.numbers[m].paper is not None for row in rows)]
    paper_name = DATASETS[name].paper_name if name in DATASETS else name
    head = [name if paper_name == name else f"{name} (paper: {paper_name})", counted]
    for metric in metrics:
        title = names.get(metric, metric)
        head += [f"{title}, paper", f"{title}, ours"] if metric in printed else [f"{title}, ours"]
    lines = []
    for row in rows:
        cells = [row.label, str(row.seeds)]
        for metric in metrics:
            number, digits = row.numbers.get(metric, Number(None)), DIGITS.get(metric, 2)
            cells += [_format(number.paper, digits)] if metric in printed else []
            ends = number.interval
            interval = f" [{ends[0]:.{digits}f}, {ends[1]:.{digits}f}]" if number.values and ends else ""
            cells.append(_format(number.mean, digits) + interval)
        lines.append(cells)
    return format_table(head, lines)


def _format(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _claim_table(findings: Sequence[Finding]) -> str:
    rows = []
    for finding in findings:
        claim, comparison = finding.claim, finding.comparison
        text = f"{claim.text}: {compared_rows(finding)}" + (" †" if claim.contradicted else "")
        difference = ""
        if comparison is not None:
            difference = f"{comparison.difference:+.3f} [{comparison.low:+.3f}, {comparison.high:+.3f}]"
        paper = "" if claim.gain is None else f"{claim.gain:+.3g}"
        rows.append([text, claim.data, paper, difference, finding.observed, f"**{finding.verdict}**", finding.reason])
    table = format_table(["claim", "dataset", "paper", "ours [95 % CI]", "observed", "verdict", "reason"], rows)
    if any(finding.claim.contradicted for finding in findings):
        table += "\n\n† The paper's own numbers contradict this claim."
    return table


def compared_rows(finding: Finding) -> str:
    """Format the comparison of a claim, such as "SVGD > MA, accuracy (%)"."""
    claim = finding.claim
    sign = {"higher": ">", "lower": "<", "same": "≈"}[claim.better]
    metric = "" if claim.metric == "score" else f", {METRIC_NAMES.get(claim.metric, claim.metric)}"
    return f"{label_of(claim.first)} {sign} {label_of(claim.second)}{metric}"


def _prepared_as_data(data: PreparedData) -> dict[str, Any]:
    facts = {"name": data.name, "paper": data.paper_name, "folder": str(data.folder)}
    mismatch = data.mismatch or Mismatch("")
    return facts | {"sizes": data.sizes, "other": mismatch.reason, "kind": mismatch.kind}


def _numbers_as_data(row: Row) -> dict[str, Any]:
    return {
        metric: {"paper": n.paper, "mean": n.mean, "interval": n.interval, "values": list(n.values)}
        for metric, n in row.numbers.items()
    }


def _finding_as_data(finding: Finding) -> dict[str, Any]:
    facts = {"verdict": finding.verdict, "outcome": finding.outcome, "why": finding.reason, "here": finding.observed}
    return asdict(finding.claim) | facts | {"seen": _comparison_as_data(finding.comparison)}


def _comparison_as_data(comparison: Comparison | None) -> dict[str, Any] | None:
    if comparison is None:
        return None
    p_value = None if math.isnan(comparison.p_value) else comparison.p_value  # JSON has no NaN
    return asdict(comparison) | {"p_value": p_value}
