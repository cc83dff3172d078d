"""`repulsive ls`: which recipes there are, and which runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def ls(
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs"),
    recipes: Annotated[bool, typer.Option("--recipes", help="Built-in recipes only.")] = False,
) -> None:
    """List built-in recipes and the runs in a folder, with how far they are."""
    from repulsive.recipes.listing import describe_recipes, describe_runs

    typer.echo(describe_recipes())
    if not recipes:
        typer.echo("")
        typer.echo(describe_runs(out))
