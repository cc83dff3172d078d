"""`repulsive doctor`: show the installation, and what is missing from it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from repulsive.cli.say import say


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Show versions, devices, settings and extras; exit with 1 if a required package is missing or broken."""
    from repulsive.environment.collect import collect
    from repulsive.environment.describe import describe

    environment = collect()
    say(json.dumps({**asdict(environment), "problems": environment.problems}) if as_json else describe(environment))
    if environment.problems:
        raise typer.Exit(1)
