"""The steps of `repulsive reproduce`: check, train, evaluate and write."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from repulsive.errors import ConfigError, RepulsiveError
from repulsive.lab.engine.files import write_text
from repulsive.lab.paper import toy
from repulsive.lab.paper.artefact import Artefact
from repulsive.lab.paper.catalogue import FIGURES
from repulsive.lab.paper.datasets import check_prepared
from repulsive.lab.paper.options import Log, Options
from repulsive.lab.paper.report import Report
from repulsive.lab.paper.report_files import as_markdown, summary, write
from repulsive.lab.paper.run_sets import train
from repulsive.lab.runs.plan import check_device
from repulsive.pages.figures.write import check_matplotlib
from repulsive.terminal.progress import Progress, no_progress

SUMMARY = "summary.md"


def quick(options: Options) -> Options:
    """Return the same options at toy size, with separate data and runs below `out`.

    Raises:
        ConfigError: the options name a folder of data or of runs.
    """
    if (options.data, options.runs) != (Options.data, Options.runs):
        raise ConfigError("--quick generates its data and keeps its runs in --out; leave out --data and --runs")
    return dataclasses.replace(
        options, data=options.out / "data", runs=options.out / "runs", toy=True, device=options.device or "cpu"
    )


def check_claims_options(options: Options) -> None:
    """Check that no option is given that would have no effect where claims are judged by committed results.

    Raises:
        ConfigError: there is such an option.
    """
    used = dataclasses.replace(options, out=Options.out, results=Options.results)
    if used != Options():
        raise ConfigError(
            "claims is made from committed results and trains nothing; it takes --from, --out, --full, --markdown and "
            "--json only"
        )


def reproduce(
    artefacts: Sequence[Artefact], options: Options, log: Log, progress: Progress = no_progress
) -> tuple[list[Report], list[str]]:
    """Check all data, train all missing runs, then write every table and figure.

    Args:
        artefacts: the tables and figures to reproduce.
        options: options of the reproduction.
        log: receives progress messages.
        progress: receives the number of tables and figures written, after the training.

    Returns:
        The reports, which are also written to `options.out`, and one message for each failed run. Artefacts that need
        a failed run may be missing.

    Raises:
        DataError: data are missing; nothing was trained.
        ConfigError: a recipe, a device or Matplotlib is missing, or an option has no effect; nothing was trained.
        RunError: a folder holds a run with other settings, or a file cannot be written.
        Stopped: Ctrl-C or SIGTERM; rerun the same command to resume.
    """
    check_device(options.device)
    if options.judgements and not any(artefact.id == "table5" for artefact in artefacts):
        raise ConfigError("--judgements: only table5 counts judgements; add table5, or leave it out")
    if options.changed("data.folder") is not None:
        raise ConfigError(
            "--set data.folder: every dataset has its own folder; name the folder that holds them: --data"
        )
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
    for number, artefact in enumerate(artefacts):
        progress("tables and figures", number, len(artefacts))
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


def all_as_markdown(reports: Sequence[Report]) -> str:
    """Format all reports as Markdown, one after the other; with several reports, add the summary."""
    pages = [as_markdown(report) for report in reports]
    return "\n\n".join([*pages, summary(reports)] if len(reports) > 1 else pages)
