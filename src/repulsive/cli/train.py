"""`repulsive train RECIPE...`: train, or resume training."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from repulsive.cli.output import FullOption, JsonOption, MarkdownOption, RequeueOption, print_text
from repulsive.cli.results import print_results


def train(
    recipes: Annotated[
        list[str], typer.Argument(metavar="RECIPE...", help="TOML files, or names from `repulsive ls`.")
    ],
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting: key=value, for example optimizer.lr=0.01.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed; default: that of the recipe.")] = None,
    seeds: Annotated[
        int, typer.Option(help="Train this many runs per recipe, with seeds 0, 1, ...; 0: one run.", min=0)
    ] = 0,
    jobs: Annotated[int, typer.Option(help="Number of parallel runs; 0: one per core.", min=0)] = 0,
    out: Annotated[Path, typer.Option(help="Output folder for all runs.")] = Path("runs"),
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda if available.")] = None,
    logger: Annotated[
        list[str] | None,
        typer.Option(
            help="Also log to wandb, mlflow, trackio or a logger of another package; TensorBoard is always written."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the result.")] = False,
    full: FullOption = False,
    markdown: MarkdownOption = False,
    as_json: JsonOption = False,
    requeue: RequeueOption = False,
) -> None:
    """Train recipes and compare them with the first one. Rerun the same command to resume."""
    from repulsive.lab.engine.launch import prints_progress, train_here, train_many
    from repulsive.lab.engine.requeue import requeueing
    from repulsive.lab.engine.tables import ended, rows
    from repulsive.lab.runs.plan import plan
    from repulsive.lab.systems.registry import make_task

    specs = plan(recipes, changes or [], seed=seed, seeds=seeds, out=out, device=device, loggers=logger or [])
    live = not quiet and sys.stderr.isatty()  # the live table names the folders
    report = None if quiet or live else lambda spec, state: print_text(f"{spec.folder}: {state}", err=True)
    if len(specs) == 1:
        with requeueing(requeue):
            train_here(specs[0], make_task, quiet)
        if prints_progress():
            if report is not None:
                report(specs[0], "done")
            print_results(rows([specs[0].folder]), full=full, markdown=markdown, as_json=as_json)
        return
    try:
        with requeueing(requeue):
            train_many(specs, make_task, jobs, report, show=live)
    finally:  # also print the finished runs if another one failed or was stopped
        if folders := ended(dict.fromkeys(spec.folder.parent for spec in specs)):
            print_results(rows(folders), full=full, markdown=markdown, as_json=as_json)
