"""The steps of `repulsive reproduce`: list, or check, train, evaluate and write."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from repulsive.errors import ConfigError, DataError, RepulsiveError
from repulsive.lab.engine.files import write_text
from repulsive.lab.paper import toy
from repulsive.lab.paper.artefact import Artefact
from repulsive.lab.paper.catalogue import ARTEFACTS, FIGURES
from repulsive.lab.paper.datasets import Dataset, check_prepared
from repulsive.lab.paper.options import Log, Options
from repulsive.lab.paper.report import Report
from repulsive.lab.paper.report_files import as_markdown, summary, write
from repulsive.lab.paper.run_sets import count_finished, train
from repulsive.lab.runs.plan import check_device
from repulsive.lab.text.folders import MANIFEST
from repulsive.pages.figures.write import check_matplotlib

SUMMARY = "summary.md"


def listing(options: Options) -> str:
    """List all tables and figures, one line each: title, datasets, runs, and whether results exist."""
    lines = []
    for name, artefact in ARTEFACTS.items():
        state = f"written to {options.out / name}.md" if (options.out / f"{name}.md").is_file() else "no results"
        lines.append((name, f"{artefact.title} ({artefact.source})", *_requirements(artefact, options), state))
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    legend = f"* not prepared in {options.data}. With {options.seeds} seeds; runs in {options.runs}."
    return "\n".join([*table, "", legend, "repulsive reproduce ID... --data DIR, or: repulsive reproduce all --quick"])


def quick(options: Options) -> Options:
    """Return the same options at toy size, with separate data and runs below `out`."""
    return dataclasses.replace(
        options, data=options.out / "data", runs=options.out / "runs", toy=True, device=options.device or "cpu"
    )


def reproduce(artefacts: Sequence[Artefact], options: Options, log: Log) -> tuple[list[Report], list[str]]:
    """Check all data, train all missing runs, then write every table and figure.

    Args:
        artefacts: the tables and figures to reproduce.
        options: options of the reproduction.
        log: receives progress messages.

    Returns:
        The reports, which are also written to `options.out`, and one message for each failed run. Artefacts that need
        a failed run may be missing.

    Raises:
        DataError: data are missing; nothing was trained.
        ConfigError: a recipe, a device or Matplotlib is missing; nothing was trained.
        RunError: a folder holds a run with other settings, or a file cannot be written.
        Stopped: Ctrl-C or SIGTERM; rerun the same command to resume.
    """
    check_device(options.device)
    if any(artefact.id in FIGURES for artefact in artefacts):
        check_matplotlib()
    required = list(
        {data.name: data for artefact in artefacts for data in artefact.required_datasets(options)}.values()
    )
    if options.toy:
        toy.make(required, options.data)
    check_prepared(required, options.data)
    failed = train([runs for artefact in artefacts for runs in artefact.run_sets(options)], options, log)
    reports = []
    for artefact in artefacts:
        try:
            report = artefact.report(options, log)
        except RepulsiveError as error:
            if not failed:
                raise
            log(f"{artefact.id}: left out, {error}")
            continue
        write(report, options.out)
        reports.append(report)
    if len(reports) > 1:
        write_text(options.out / SUMMARY, summary(reports) + "\n")
    return reports, failed


def as_text(reports: Sequence[Report]) -> str:
    """Format all reports as Markdown, one after the other; with several reports, add the summary."""
    pages = [as_markdown(report) for report in reports]
    return "\n\n".join([*pages, summary(reports)] if len(reports) > 1 else pages)


def _requirements(artefact: Artefact, options: Options) -> tuple[str, str]:
    """Format the datasets of an artefact, with a star if not prepared, and its number of runs."""
    try:
        datasets, run_sets = artefact.required_datasets(options), artefact.run_sets(options)
    except (DataError, ConfigError):  # raised by --datasets or --methods
        return "no requested dataset or method applies", ""
    done, count = count_finished(run_sets, options)
    names = [f"{data.name}{'' if _is_prepared(data, options.data) else '*'}" for data in datasets]
    return ", ".join(names), f"{count} runs, {done} done"


def _is_prepared(dataset: Dataset, root: Path) -> bool:
    return (dataset.folder(root) / MANIFEST).is_file()
