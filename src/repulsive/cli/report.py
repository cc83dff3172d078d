"""`repulsive report RUN...`: one page from finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repulsive.cli.say import say


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs: one, or one with seeds.")],
    out: Annotated[Path, typer.Option(help="The page, one HTML file.")] = Path("report.html"),
    part: Annotated[str, typer.Option(help="test, dev or a further test set.")] = "test",
    foreign: Annotated[Path | None, typer.Option(help="Another prepared folder: texts to be unsure of.")] = None,
    heads: Annotated[
        bool, typer.Option("--heads", help="How many heads: error against their number, for runs that differ in it.")
    ] = False,
    bleu: Annotated[
        bool, typer.Option("--bleu", help="Translators: take heads away by BLEU, which is slow, not by accuracy.")
    ] = False,
    figures: Annotated[Path | None, typer.Option(help="Folder for all figures as SVG and PDF.")] = None,
    most: Annotated[int, typer.Option(min=1, help="Take heads away on at most so many items.")] = 2000,
    title: Annotated[str, typer.Option(help="Of the page.", show_default=False)] = "",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = None,
) -> None:
    """Write one page on finished runs: results, curves, how alike heads are, what each is worth, how sure."""
    from repulsive.lab.runs.plan import check_device
    from repulsive.lab.runs.report import Options, write

    check_device(device)
    options = Options(part=part, most=most, foreign=foreign, heads=heads, bleu=bleu, device=device, title=title)
    for path in write(runs, out, figures, options, lambda line: say(line, err=True)):
        say(f"written to {path}")
