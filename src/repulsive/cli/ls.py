"""`repulsive ls`: list recipes and runs, or show one recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repulsive.cli.output import JsonOption, print_json, print_tables, print_text


def ls(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE or TEXT]",
            help="Show all settings of this recipe, a TOML file or a name from the list; any other text lists the "
            "recipes and runs whose name contains it.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs"),
    recipes: Annotated[bool, typer.Option("--recipes", help="Built-in recipes only.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Show the description of each recipe.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List built-in recipes by dataset and the runs in a folder, or show one recipe as TOML."""
    from repulsive.lab.runs import listing

    if recipe is not None and not listing.is_pattern(recipe, out):
        if as_json:
            print_json({"name": recipe, "settings": listing.recipe_settings(recipe)})
        else:
            print_text(listing.describe_recipe(recipe))
        return
    pattern = recipe or ""
    if as_json:
        runs = [] if recipes else listing.list_runs(out, pattern)
        print_json({"recipes": listing.list_recipes(pattern), "runs": runs})
        return
    print_tables([*listing.describe_recipes(pattern, full), *([] if recipes else listing.describe_runs(out, pattern))])
