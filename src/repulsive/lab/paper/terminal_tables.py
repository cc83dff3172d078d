"""Reports of `repulsive reproduce` as tables for a terminal, and the list of tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from repulsive.errors import ConfigError, DataError
from repulsive.lab.paper.artefact import Artefact
from repulsive.lab.paper.catalogue import ARTEFACTS
from repulsive.lab.paper.datasets import DATASETS
from repulsive.lab.paper.options import Options
from repulsive.lab.paper.report import Number, Report, Row
from repulsive.lab.paper.report_files import METRIC_NAMES, compared_rows, count_verdicts
from repulsive.lab.paper.result_files import committed
from repulsive.lab.paper.run_sets import count_finished
from repulsive.lab.paper.verdicts import OUTCOMES, Finding
from repulsive.lab.text.folders import MANIFEST
from repulsive.terminal.table import MarkdownText, Table, signed, three_digits

Block = Table | MarkdownText | str


def report_tables(reports: Sequence[Report], full: bool = False) -> list[Block]:
    """Make the tables of all reports; with several reports, add the number of claims with each verdict.

    Args:
        reports: the reports.
        full: show confidence intervals, reasons of verdicts, notes on the paper and long texts.
    """
    blocks: list[Block] = []
    for report in reports:
        blocks += _report(report, full)
    if len(reports) > 1:
        rows = [[report.id, *map(str, count_verdicts(report))] for report in reports]
        blocks.append(Table(["table or figure", *OUTCOMES.values()], rows, "Claims"))
    if not full:
        blocks.append("--full: confidence intervals, reasons of the verdicts, notes on the paper.")
    return blocks


def list_artefacts(options: Options) -> list[dict[str, Any]]:
    """List all tables and figures of the paper with their data, runs and results.

    Returns:
        For each: id, title, source, datasets (name -> whether it is prepared), runs, runs done, the written file or
        None, and the files of committed results. Datasets and runs are None if no requested dataset or method applies.
    """
    entries = []
    for name, artefact in ARTEFACTS.items():
        path = options.out / f"{name}.md"
        entry = {"id": name, "title": artefact.title, "source": artefact.source}
        written = str(path) if path.is_file() else None
        files = {"written": written, "committed": [str(path) for path in committed(name, options.results)]}
        entries.append(entry | _requirements(artefact, options) | files)
    return entries


def listing(options: Options, full: bool = False) -> list[Block]:
    """Make a table of all tables and figures: title, runs, and whether results exist.

    Args:
        options: options of the reproduction.
        full: also show the datasets, and all files of committed results.
    """
    rows = []
    for entry in list_artefacts(options):
        runs = "none apply" if entry["runs"] is None else f"{entry['done']} of {entry['runs']}"
        datasets = ", ".join(f"{name}{'' if ready else '*'}" for name, ready in (entry["datasets"] or {}).items())
        state = "written" if entry["written"] else "no results"
        title = f"{entry['title']} ({entry['source']})"
        files = entry["committed"] if full else sorted({str(Path(path).parent) for path in entry["committed"]})
        rows.append([entry["id"], title, *([datasets] if full else []), runs, state, ", ".join(files) or "none"])
    titles = ["id", "shows", *(["datasets"] if full else []), "runs done", "your results", "committed results"]
    legend = f"With {options.seeds} seeds; runs in {options.runs}, your results in {options.out}."
    if full:
        legend = f"* not prepared in {options.data}. {legend}"
    if not options.results.is_dir():
        legend += f" No folder {options.results}: pass that of a checkout with --from to see committed results."
    commands = "repulsive reproduce ID... --data DIR, or: repulsive reproduce all --quick"
    return [Table(titles, rows), legend, commands, "repulsive reproduce claims: all claims and the committed results"]


def _report(report: Report, full: bool) -> list[Block]:
    blocks: list[Block] = [f"{report.id}: {report.title} ({report.source})"]
    for data in report.data:
        if data.mismatch:
            blocks.append(f"{data.name}: not the paper's data ({data.mismatch.reason})")
    for name in dict.fromkeys(row.dataset for row in report.rows):
        blocks.append(_numbers([row for row in report.rows if row.dataset == name], name, report.counted, full))
    if report.findings:
        blocks.append(_claims(report.findings, full))
    if full:
        blocks += [MarkdownText(text) for text in report.texts]
        blocks += [f"Note on the paper: {note}" for note in report.notes]
    if report.files:
        blocks.append("written: " + ", ".join(map(str, report.files)))
    return blocks


def _numbers(rows: Sequence[Row], name: str, counted: str, full: bool) -> Table:
    metrics = list(dict.fromkeys(metric for row in rows for metric in row.numbers))
    with_metric = len(metrics) > 1
    cells = []
    for metric in metrics:
        for row in rows:
            number = row.numbers.get(metric, Number(None))
            if number.paper is None and number.mean is None:
                continue
            first = [METRIC_NAMES.get(metric, metric)] if with_metric else []
            paper = "" if number.paper is None else three_digits(number.paper)
            ours = "" if number.mean is None else three_digits(number.mean)
            ends = number.interval if number.values else None
            interval = "" if ends is None else f"{three_digits(ends[0])} to {three_digits(ends[1])}"
            cells.append([*first, row.label, paper, ours, *([interval, str(row.seeds)] if full else [])])
    metric = "" if with_metric or not metrics else f", {METRIC_NAMES.get(metrics[0], metrics[0])}"
    titles = [*(["metric"] if with_metric else []), "method", "paper", "ours"]
    paper_name = DATASETS[name].paper_name if name in DATASETS else name
    title = name if paper_name == name else f"{name} (paper: {paper_name})"
    return Table([*titles, *(["95 % interval", counted] if full else [])], cells, title + metric)


def _claims(findings: Sequence[Finding], full: bool) -> Table:
    rows = []
    for finding in findings:
        comparison = finding.comparison
        text = f"{compared_rows(finding)} ({finding.claim.data})"
        difference = "" if comparison is None else signed(comparison.difference)
        if full:
            text = f"{finding.claim.text}: {text}" + (" †" if finding.claim.contradicted else "")
            if comparison is not None:
                difference += f" [{signed(comparison.low)}, {signed(comparison.high)}]"
        paper = "" if finding.claim.gain is None else signed(finding.claim.gain)
        rows.append([text, paper, difference, finding.verdict, *([finding.reason] if full else [])])
    titles = ["claim", "paper", "ours", "verdict", *(["reason"] if full else [])]
    contradicted = full and any(finding.claim.contradicted for finding in findings)
    return Table(titles, rows, "claims († contradicted by the paper's own numbers)" if contradicted else "claims")


def _requirements(artefact: Artefact, options: Options) -> dict[str, Any]:
    try:
        datasets, run_sets = artefact.required_datasets(options), artefact.run_sets(options)
    except (DataError, ConfigError):  # raised by --datasets or --methods
        return {"datasets": None, "runs": None, "done": None}
    done, count = count_finished(run_sets, options)
    prepared = {data.name: (data.folder(options.data) / MANIFEST).is_file() for data in datasets}
    return {"datasets": prepared, "runs": count, "done": done}
