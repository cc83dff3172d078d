"""`repulsive report RUN...`: write an HTML report on finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repulsive.cli.output import JsonOption, print_json, print_progress, print_text


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs: of one run, or of all seeds of a recipe.")
    ],
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
    part: Annotated[str, typer.Option(help="Part of the data: test, dev, or the name of another test set.")] = "test",
    foreign: Annotated[
        Path | None,
        typer.Option(help="Prepared folder of another dataset, to measure uncertainty on unfamiliar texts."),
    ] = None,
    heads: Annotated[
        bool,
        typer.Option("--heads", help="Plot the error against the number of heads, for runs with different numbers."),
    ] = False,
    bleu: Annotated[
        bool, typer.Option("--bleu", help="Translation only: measure ablations by BLEU (slow) instead of accuracy.")
    ] = False,
    figures: Annotated[
        Path | None, typer.Option(help="Also write all figures as SVG and PDF files to this folder.")
    ] = None,
    most: Annotated[int, typer.Option(min=1, help="Maximum number of items for ablations.")] = 2000,
    title: Annotated[str, typer.Option(help="Title of the page.", show_default=False)] = "",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda if available.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write an HTML report on finished runs: results, curves, similarity and importance of heads, calibration."""
    from repulsive.lab.runs.plan import check_device
    from repulsive.lab.runs.report import Options, write

    check_device(device)
    options = Options(part=part, most=most, foreign=foreign, heads=heads, bleu=bleu, device=device, title=title)
    written = write(runs, out, figures, options, print_progress)
    if as_json:
        print_json({"written": written})
    else:
        print_text("\n".join(f"written to {path}" for path in written))
