"""`repulsive doctor`: show the installation, and what is missing from it."""

from __future__ import annotations

from dataclasses import asdict

import typer

from repulsive.cli.output import JsonOption, print_json, print_text


def doctor(
    as_json: JsonOption = False,
) -> None:
    """Show versions, devices, settings and extras; exit with 1 if a required package is missing or broken."""
    from repulsive.environment.collect import collect
    from repulsive.environment.describe import describe

    environment = collect()
    if as_json:
        print_json({**asdict(environment), "problems": environment.problems})
    else:
        print_text(describe(environment))
    if environment.problems:
        raise typer.Exit(1)
