"""`repulsive reproduce [ID...]`: reproduce the tables and figures of the paper and check its claims."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repulsive.cli.output import (
    FullOption,
    JsonOption,
    MarkdownOption,
    RequeueOption,
    print_json,
    print_progress,
    print_tables,
    print_text,
)


def reproduce(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID...", help="Tables and figures to reproduce, such as table1; or all; or claims."),
    ] = None,
    data: Annotated[Path, typer.Option(help="Folder with one prepared folder per dataset, named after it.")] = Path(
        "prepared"
    ),
    out: Annotated[Path, typer.Option(help="Output folder for Markdown, JSON, pages and figures.")] = Path(
        "reproduced"
    ),
    runs: Annotated[Path, typer.Option(help="Folder of all runs, as for `repulsive train`.")] = Path("runs"),
    seeds: Annotated[
        int | None, typer.Option(help="Number of runs per row; default: 6, the minimum for p <= 0.05.", min=1)
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda if available.")] = None,
    jobs: Annotated[int, typer.Option(help="Number of parallel runs; 0: one per core.", min=0)] = 0,
    changes: Annotated[list[str] | None, typer.Option("--set", help="Change a setting of all runs: key=value.")] = None,
    methods: Annotated[
        list[str] | None, typer.Option(help="Methods to train besides the baseline, default: all; repeatable, or a,b.")
    ] = None,
    datasets: Annotated[
        list[str] | None, typer.Option(help="Datasets to use, default: all of the paper; repeatable, or a,b.")
    ] = None,
    judgements: Annotated[
        list[Path] | None, typer.Option(help="table5 only: answers of the judges and the key, for example *.json.")
    ] = None,
    times: Annotated[bool, typer.Option(help="Measure step times where the paper reports them.")] = True,
    results: Annotated[
        Path, typer.Option("--from", help="Folder of committed results, which a checkout has: claims, and the list.")
    ] = Path("results"),
    quick: Annotated[bool, typer.Option("--quick", help="Smoke test: tiny models on generated data.")] = False,
    full: FullOption = False,
    markdown: MarkdownOption = False,
    as_json: JsonOption = False,
    requeue: RequeueOption = False,
) -> None:
    """Print the paper's numbers beside ours, and a verdict on each claim.

    Without an ID, list all tables and figures. The ID claims trains nothing: it judges all claims by committed results.
    """
    from repulsive.errors import RunError
    from repulsive.lab.engine.requeue import requeueing
    from repulsive.lab.paper import reproduce as paper
    from repulsive.lab.paper import toy
    from repulsive.lab.paper.catalogue import CLAIMS, find
    from repulsive.lab.paper.options import Options
    from repulsive.lab.paper.report_files import as_data
    from repulsive.lab.paper.terminal_tables import list_artefacts, listing, report_tables
    from repulsive.terminal.progress import progress_bar

    words = ids or []
    files = [
        *(judgements or []),
        *(Path(word) for word in words if word.endswith(".json")),
    ]  # from a shell pattern such as *.json
    options = Options(
        data,
        out,
        runs,
        seeds or (toy.SEEDS if quick else Options.seeds),
        device,
        jobs,
        tuple(changes or []),
        _split(methods),
        _split(datasets),
        tuple(files),
        times=times,
        results=results,
    )
    options = paper.quick(options) if quick else options
    names = [word for word in words if not word.endswith(".json")]
    if not names:
        if as_json:
            print_json({"artefacts": list_artefacts(options)})
        else:
            print_tables(listing(options, full))
        return
    if names == [CLAIMS]:
        paper.check_claims_options(options)
        _print_claims(options.results, out, full, markdown, as_json)
        return
    with requeueing(requeue), progress_bar() as progress:
        reports, failed = paper.reproduce(find(names), options, print_progress, progress)
    if as_json:
        print_json({"reports": [as_data(report) for report in reports], "failed": failed, "out": out})
    elif markdown:
        print_text(paper.all_as_markdown(reports))
    else:
        print_tables(report_tables(reports, full))
    print_text(f"\nwritten to {out}", err=as_json)
    if failed:
        raise RunError(
            f"{len(failed)} of the runs failed; rerun the same command to try them again. The first: {failed[0]}"
        )


def _print_claims(results: Path, out: Path, full: bool, markdown: bool, as_json: bool) -> None:
    from repulsive.lab.paper import claims_report
    from repulsive.lab.paper.all_claims import judge_claims
    from repulsive.lab.paper.result_files import ResultFiles

    rows, missing = judge_claims(ResultFiles(results))
    written = claims_report.write(rows, out)
    if as_json:
        print_json({"claims": claims_report.as_data(rows), "missing": missing, "written": written})
    elif markdown:
        print_text(claims_report.as_markdown(rows))
    else:
        print_tables(claims_report.tables(rows, full))
    if missing:
        print_text(f"\nclaims without results are left out; missing in {results}: {', '.join(missing)}", err=as_json)
    print_text(f"\nwritten: {', '.join(map(str, written))}", err=as_json)


def _split(words: list[str] | None) -> tuple[str, ...]:
    """Split words at commas: `["a,b", "c"]` -> `("a", "b", "c")`."""
    return tuple(part.strip() for word in words or [] for part in word.split(",") if part.strip())
