"""`repulsive sweep RECIPE`: choose settings on the development set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repulsive.cli.output import JsonOption, RequeueOption, print_json, print_progress, print_tables


def sweep(
    recipe: Annotated[str, typer.Argument(help="TOML file, or a name from `repulsive ls`.")],
    over: Annotated[
        list[str] | None,
        typer.Option(help="Values to try: key=value,value,... Repeat for a grid. Each rule has a default grid."),
    ] = None,
    then: Annotated[
        list[str] | None,
        typer.Option(help="Values to try in a second stage, which starts from the best settings of the first."),
    ] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="Change a setting of all runs: key=value.")] = None,
    seeds: Annotated[int, typer.Option(help="Number of runs per combination of values.", min=1)] = 1,
    jobs: Annotated[int, typer.Option(help="Number of parallel runs; 0: one per core.", min=0)] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder of the sweep; default: sweeps/RECIPE.")] = None,
    storage: Annotated[
        str | None,
        typer.Option(help="Optuna storage, to share a sweep between machines; default: an SQLite file in --out."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda if available.")] = None,
    as_json: JsonOption = False,
    requeue: RequeueOption = False,
) -> None:
    """Try settings and write the best as a recipe. Rerun the same command to resume.

    The default grid depends on the rule. For SPOS it is the stepsize (epsilon) and alpha, then beta, as in the paper.
    """
    from repulsive.lab.engine.requeue import requeueing
    from repulsive.lab.runs.sweep import run_sweep, sweep_as_json, sweep_tables

    with requeueing(requeue):
        result = run_sweep(
            recipe,
            over or (),
            then or (),
            changes or (),
            seeds=seeds,
            jobs=jobs,
            out=out,
            storage=storage,
            device=device,
            progress=print_progress,
        )
    if as_json:
        print_json(sweep_as_json(result))
    else:
        print_tables(sweep_tables(result))
