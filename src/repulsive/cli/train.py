"""`repulsive train RECIPE`: train, or go on where a training stopped."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from repulsive.cli.say import say


def train(
    recipes: Annotated[list[str], typer.Argument(metavar="RECIPE...", help="TOML files, or names that `ls` lists.")],
    changes: Annotated[list[str] | None, typer.Option("--set", help="key=value, such as optimizer.lr=0.01.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the run; the recipe's by default.")] = None,
    seeds: Annotated[int, typer.Option(help="Run seeds 0, 1, ... side by side on one device.", min=0)] = 0,
    jobs: Annotated[int, typer.Option(help="Runs at the same time; 0: as many as there are cores.", min=0)] = 0,
    out: Annotated[Path, typer.Option(help="Folder of all runs.")] = Path("runs"),
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but the result.")] = False,
) -> None:
    """Train recipes; the first is what the others are compared with. The same command goes on where it was stopped."""
    from repulsive.lab.engine.launch import speaks, train_here, train_many
    from repulsive.lab.engine.tables import as_markdown, ended, rows
    from repulsive.lab.runs.plan import plan
    from repulsive.lab.systems.registry import make_task

    specs = plan(recipes, changes or [], seed=seed, seeds=seeds, out=out, device=device)
    if len(specs) == 1:
        train_here(specs[0], make_task, quiet)
        if speaks():
            say(as_markdown(rows([specs[0].folder])))
        return
    live = not quiet and sys.stderr.isatty()
    tell = None if quiet or live else lambda spec, how: say(f"{spec.folder}: {how}", err=True)
    try:
        train_many(specs, make_task, jobs, tell, show=live)
    finally:  # a run that failed or was stopped hides none of those that ended
        if folders := ended(dict.fromkeys(spec.folder.parent for spec in specs)):
            say(as_markdown(rows(folders)))
