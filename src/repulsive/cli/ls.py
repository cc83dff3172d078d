"""`repulsive ls`: which recipes there are, and which runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repulsive.cli.say import say


def ls(
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs"),
    recipes: Annotated[bool, typer.Option("--recipes", help="Built-in recipes only.")] = False,
) -> None:
    """List built-in recipes and the runs in a folder, with how far they are."""
    from repulsive.lab.runs.listing import describe_recipes, describe_runs

    say(describe_recipes())
    if not recipes:
        say("")
        say(describe_runs(out))
