"""`repulsive reproduce [ID...]`: the paper's tables and figures, and what its claims come to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repulsive.cli.say import say


def reproduce(
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID...", help="table1, heads, ...; or all.")] = None,
    data: Annotated[Path, typer.Option(help="Folder of prepared folders, each named after its data set.")] = Path(
        "prepared"
    ),
    out: Annotated[Path, typer.Option(help="Folder for Markdown, JSON, pages and figures.")] = Path("reproduced"),
    runs: Annotated[Path, typer.Option(help="Folder of all runs, as that of `train`.")] = Path("runs"),
    seeds: Annotated[
        int | None, typer.Option(help="Runs of every row; 6 by default, the least that p = 0.05 needs.", min=1)
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = None,
    jobs: Annotated[int, typer.Option(help="Runs at the same time; 0: as many as there are cores.", min=0)] = 0,
    changes: Annotated[list[str] | None, typer.Option("--set", help="key=value for every run.")] = None,
    methods: Annotated[
        list[str] | None, typer.Option(help="Rows to train beside the baseline; repeatable, or a,b.")
    ] = None,
    datasets: Annotated[
        list[str] | None, typer.Option(help="Data sets to use instead of all of the paper's; repeatable, or a,b.")
    ] = None,
    judgements: Annotated[
        list[Path] | None, typer.Option(help="table5: files of the judges and the key, such as *.json.")
    ] = None,
    times: Annotated[bool, typer.Option(help="Measure what a step takes, where the paper does.")] = True,
    quick: Annotated[bool, typer.Option("--quick", help="All at toy size on generated data: does it run?")] = False,
) -> None:
    """Print the paper's numbers beside ours, with intervals and a verdict on each claim; without an ID, list them."""
    from repulsive.errors import RunError
    from repulsive.lab.paper import reproduce as paper
    from repulsive.lab.paper import toy
    from repulsive.lab.paper.catalogue import find
    from repulsive.lab.paper.options import Options

    words = ids or []
    files = [*(judgements or []), *(Path(word) for word in words if word.endswith(".json"))]  # a shell's `*.json`
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
    )
    options = paper.quick(options) if quick else options
    names = [word for word in words if not word.endswith(".json")]
    if not names:
        say(paper.listing(options))
        return
    reports, failed = paper.reproduce(find(names), options, lambda line: say(line, err=True))
    say(paper.as_text(reports))
    say(f"\nwritten to {out}")
    if failed:
        raise RunError(f"{len(failed)} runs failed, and the same command tries them again; the first: {failed[0]}")


def _split(words: list[str] | None) -> tuple[str, ...]:
    """`["a,b", "c"]` -> `("a", "b", "c")`."""
    return tuple(part.strip() for word in words or [] for part in word.split(",") if part.strip())
