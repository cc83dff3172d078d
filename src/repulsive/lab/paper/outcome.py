"""What a table or figure came to, as data, Markdown and JSON: the paper's numbers beside ours, and the verdicts."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from repulsive.lab.engine.files import write_text
from repulsive.lab.engine.runs import versions
from repulsive.lab.paper.datasets import DATASETS, Found
from repulsive.lab.paper.published import published
from repulsive.lab.paper.verdicts import CONFIRMED, NOT_CONFIRMED, NOT_TESTED, Finding
from repulsive.metrics.compare import Comparison
from repulsive.metrics.student import interval

DIGITS = {"accuracy": 2, "dist": 3, "time": 3, "overlap": 3, "ece15": 3, "oe15": 3, "best": 0, "foreign entropy": 3}
NAMES = {"bleu": "BLEU", "sacrebleu": "sacreBLEU", "accuracy": "accuracy (%)", "dist": "Dist", "time": "time of a step"}
OF_GRAPHS = {"bleu": "BLEU-4"}
LABELS = {
    "ma": "MA",
    "frobenius": "MA + R",
    "disagreement": "MA + R",
    "svgd": "SVGD",
    "spos": "SPOS",
    "sgld": "SGLD",
    "gaussian": "SVGD, Gaussian prior",
    "big": "Transformer-big",
    "q": "RMA (Q)",
    "k": "RMA (K)",
    "v": "RMA (V)",
    "encoder": "RMA (En)",
    "decoder": "RMA (De)",
    "cross": "RMA (En-De)",
    "first": "RMA (first layer)",
    "last": "RMA (last layer)",
    "cosine-regulariser": "cosine: regulariser",
    "cosine-derivative": "cosine: derivative",
    "cosine-smoothing": "cosine: smoothing",
    "gw": "GW",
    "cosine": "GW + R",
    "rma": "GW + RMA",
}


@dataclass(frozen=True)
class Number:
    """The paper's number and ours.

    Args:
        paper: as printed; None where it prints none.
        ours: seed by seed; none where it was not measured.
        ends: of our interval; None: Student's t over the seeds.
    """

    paper: float | None
    ours: Sequence[float] = ()
    ends: tuple[float, float] | None = None

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.ours) if self.ours else None

    @property
    def interval(self) -> tuple[float, float] | None:
        return self.ends or interval(self.ours)


@dataclass(frozen=True)
class Row:
    """A method on a data set."""

    data: str
    method: str
    label: str
    seeds: int
    numbers: Mapping[str, Number]
    folder: Path | None = None  # of the runs


@dataclass(frozen=True)
class Report:
    """What came out.

    Args:
        id: of the table or figure.
        title: what it shows.
        source: where in the paper.
        data: what was trained on.
        rows: the numbers.
        findings: the claims.
        texts: Markdown between the numbers and the claims.
        files: figures and pages that were written.
        units: what the numbers are a mean over.
    """

    id: str
    title: str
    source: str
    data: Sequence[Found] = ()
    rows: Sequence[Row] = ()
    findings: Sequence[Finding] = ()
    texts: Sequence[str] = ()
    files: Sequence[Path] = ()
    units: str = "seeds"

    @property
    def notes(self) -> list[str]:
        """What does not fit in the paper."""
        return published().notes(self.id)


def write(report: Report, out: Path) -> list[Path]:
    """Write `ID.md` and `ID.json` into a folder.

    Raises:
        RunError: it cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{report.id}.md", out / f"{report.id}.json"]
    write_text(paths[0], as_markdown(report) + "\n")
    write_text(paths[1], json.dumps(as_data(report), indent=1) + "\n")
    return paths


def as_markdown(report: Report) -> str:
    """The page people read."""
    about = published().about(report.id)
    parts = [f"# {report.id}: {report.title}", f"The paper's {report.source}{f', {about}' if about else ''}."]
    if report.data:
        parts.append("\n".join(_data_line(found) for found in report.data))
    for name in dict.fromkeys(row.data for row in report.rows):
        parts.append(_table([row for row in report.rows if row.data == name], name, report.units))
    parts += report.texts
    if report.rows:
        how = "of the mean over seeds, by Student's t; of times and shares by resampling"
        parts.append(f"In brackets 95 % confidence intervals: {how}.")
    if report.findings:
        parts.append("## Claims\n\n" + _claims(report.findings))
    if report.notes:
        parts.append("## Notes on the paper\n\n" + "\n".join(f"- {note}" for note in report.notes))
    if report.files:
        parts.append("Written: " + ", ".join(str(path) for path in report.files))
    return "\n\n".join(parts)


def as_data(report: Report) -> dict[str, Any]:
    """The same as data, numbers in full."""
    rows = [
        {"data": row.data, "method": row.method, "label": row.label, "seeds": row.seeds}
        | {"runs": row.folder and str(row.folder), "numbers": _numbers(row)}
        for row in report.rows
    ]
    return {
        "id": report.id,
        "title": report.title,
        "source": report.source,
        "versions": versions(),
        "data": [asdict(found) | {"folder": str(found.folder)} for found in report.data],
        "rows": rows,
        "claims": [_finding(finding) for finding in report.findings],
        "notes": report.notes,
        "files": [str(path) for path in report.files],
    }


def summary(reports: Sequence[Report]) -> str:
    """How many claims of each table and figure were confirmed, as a Markdown table."""
    kinds = (CONFIRMED, NOT_CONFIRMED, NOT_TESTED)
    lines = ["| | claims | " + " | ".join(kinds) + " |", "|" + " --- |" * (len(kinds) + 2)]
    for report in reports:
        counts = [sum(finding.verdict == kind for finding in report.findings) for kind in kinds]
        lines.append(f"| {report.id} | {len(report.findings)} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(lines)


def _data_line(found: Found) -> str:
    sizes = ", ".join(f"{count:,} {part}" for part, count in found.sizes.items())
    other = f"**not the paper's data**: {found.other}" if found.other else "sizes as in the paper"
    return f"- {found.name} ({found.folder}): {sizes}; {other}"


def _table(rows: Sequence[Row], name: str, units: str) -> str:
    metrics = list(dict.fromkeys(metric for row in rows for metric in row.numbers))
    of_graphs = any("ROUGE-L" in row.numbers for row in rows)
    titles = {m: (OF_GRAPHS if of_graphs else {}).get(m) or NAMES.get(m, m) for m in metrics}
    printed = [m for m in metrics if any(m in row.numbers and row.numbers[m].paper is not None for row in rows)]
    paper = DATASETS[name].paper if name in DATASETS else name
    head = [name if paper == name else f"{name} (paper: {paper})", units]
    for metric in metrics:
        head += [f"{titles[metric]}, paper"] if metric in printed else []
        head.append(f"{titles[metric]}, ours")
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in rows:
        cells = [row.label, str(row.seeds)]
        for metric in metrics:
            number, digits = row.numbers.get(metric, Number(None)), DIGITS.get(metric, 2)
            cells += [_shown(number.paper, digits)] if metric in printed else []
            ends = number.interval
            told = f" [{ends[0]:.{digits}f}, {ends[1]:.{digits}f}]" if number.ours and ends else ""
            cells.append(_shown(number.mean, digits) + told)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shown(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _claims(findings: Sequence[Finding]) -> str:
    lines = ["| claim | data | difference [95 %] | here | verdict | why |", "|" + " --- |" * 6]
    for finding in findings:
        claim, seen = finding.claim, finding.seen
        said = f"{claim.text}: {_compared(finding)}" + (" †" if claim.contradicted else "")
        told = "" if seen is None else f"{seen.difference:+.3f} [{seen.low:+.3f}, {seen.high:+.3f}]"
        words = [said, claim.data, told, finding.here, f"**{finding.verdict}**", finding.why]
        lines.append("| " + " | ".join(words) + " |")
    if any(finding.claim.contradicted for finding in findings):
        lines += ["", "† The numbers the paper prints say the opposite."]
    return "\n".join(lines)


def _compared(finding: Finding) -> str:
    claim = finding.claim
    sign = {"higher": ">", "lower": "<", "same": "≈"}[claim.better]
    first, second = (LABELS.get(row, row) for row in (claim.first, claim.second))
    metric = "" if claim.metric == "score" else f", {NAMES.get(claim.metric, claim.metric)}"
    return f"{first} {sign} {second}{metric}"


def _numbers(row: Row) -> dict[str, Any]:
    return {
        metric: {"paper": n.paper, "mean": n.mean, "interval": n.interval, "values": list(n.ours)}
        for metric, n in row.numbers.items()
    }


def _finding(finding: Finding) -> dict[str, Any]:
    told = asdict(finding.claim) | {"verdict": finding.verdict, "why": finding.why, "here": finding.here}
    return told | {"seen": _comparison(finding.seen)}


def _comparison(seen: Comparison | None) -> dict[str, Any] | None:
    if seen is None:
        return None
    return asdict(seen) | {"p_value": None if math.isnan(seen.p_value) else seen.p_value}  # JSON has no nan
