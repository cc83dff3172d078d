"""`repulsive ls`: list recipes and runs, or show one recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repulsive.cli.say import say


def ls(
    recipe: Annotated[
        str | None, typer.Argument(help="Show all settings of this recipe: a TOML file, or a name from the list.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs"),
    recipes: Annotated[bool, typer.Option("--recipes", help="Built-in recipes only.")] = False,
) -> None:
    """List built-in recipes and the runs in a folder with their progress, or show one recipe as TOML."""
    from repulsive.lab.runs.listing import describe_recipe, describe_recipes, describe_runs

    if recipe is not None:
        say(describe_recipe(recipe))
        return
    say(describe_recipes())
    if not recipes:
        say("")
        say(describe_runs(out))
