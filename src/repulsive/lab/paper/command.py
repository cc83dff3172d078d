"""What `repulsive reproduce` does: list, or check, train, measure and write."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from repulsive.errors import ConfigError, DataError, RepulsiveError
from repulsive.lab.engine.files import write_text
from repulsive.lab.paper import toy
from repulsive.lab.paper.catalogue import ARTEFACTS, FIGURES, Artefact
from repulsive.lab.paper.datasets import DataSet, check_there
from repulsive.lab.paper.outcome import Report, as_markdown, summary, write
from repulsive.lab.paper.running import Options, Tell, progress, train
from repulsive.lab.runs.plan import check_device
from repulsive.lab.text.folders import MANIFEST
from repulsive.pages.figures.write import check_matplotlib

SUMMARY = "summary.md"


def listing(options: Options) -> str:
    """One line for each table and figure: what it is, which data it needs, what it would run, what there is."""
    lines = []
    for name, artefact in ARTEFACTS.items():
        state = f"written to {options.out / name}.md" if (options.out / f"{name}.md").is_file() else "no results"
        lines.append((name, f"{artefact.title} ({artefact.source})", *_needed(artefact, options), state))
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    told = ["  ".join(cell.ljust(wide) for cell, wide in zip(line, widths, strict=True)).rstrip() for line in lines]
    legend = f"* not prepared in {options.data}. With {options.seeds} seeds; runs in {options.runs}."
    return "\n".join([*told, "", legend, "repulsive reproduce ID... --data DIR, or: repulsive reproduce all --quick"])


def quick(options: Options) -> Options:
    """The same at toy size, with data and runs of its own below `out`."""
    return dataclasses.replace(
        options, data=options.out / "data", runs=options.out / "runs", toy=True, device=options.device or "cpu"
    )


def reproduce(artefacts: Sequence[Artefact], options: Options, tell: Tell) -> tuple[list[Report], list[str]]:
    """Check all data, train all runs that are not there, then write every table and figure.

    Args:
        artefacts: what to reproduce.
        options: how.
        tell: told what is going on, a line at a time.

    Returns:
        The reports, which are also written into the folder, and what went wrong with runs that failed; what needs one
        of these may be missing.

    Raises:
        DataError: data are missing; nothing was trained.
        ConfigError: a recipe, a device or Matplotlib is missing; nothing was trained.
        RunError: a folder holds a run of other settings, or nothing can be written.
        Stopped: Ctrl-C or SIGTERM came; the same command goes on.
    """
    check_device(options.device)
    if any(artefact.id in FIGURES for artefact in artefacts):
        check_matplotlib()
    needed = list({each.name: each for artefact in artefacts for each in artefact.needs(options)}.values())
    if options.toy:
        toy.make(needed, options.data)
    check_there(needed, options.data)
    rows = [row for artefact in artefacts for row in artefact.rows(options)]
    failed = train(rows, options, tell)
    reports = []
    for artefact in artefacts:
        try:
            report = artefact.report(options, tell)
        except RepulsiveError as error:
            if not failed:
                raise
            tell(f"{artefact.id}: left out, {error}")
            continue
        write(report, options.out)
        reports.append(report)
    if len(reports) > 1:
        write_text(options.out / SUMMARY, summary(reports) + "\n")
    return reports, failed


def told(reports: Sequence[Report]) -> str:
    """All pages one after the other, and how many claims were confirmed."""
    pages = [as_markdown(report) for report in reports]
    return "\n\n".join([*pages, summary(reports)] if len(reports) > 1 else pages)


def _needed(artefact: Artefact, options: Options) -> tuple[str, str]:
    """Data sets, those that are not prepared with a star, and how many runs."""
    try:
        needed, rows = artefact.needs(options), artefact.rows(options)
    except (DataError, ConfigError):  # of --datasets or --methods
        return "nothing that was asked for fits", ""
    done, count = progress(rows, options)
    names = [f"{each.name}{'' if _there(each, options.data) else '*'}" for each in needed]
    return ", ".join(names), f"{count} runs, {done} done"


def _there(data: DataSet, root: Path) -> bool:
    return (data.folder(root) / MANIFEST).is_file()
