"""`repulsive evaluate RUN...`: evaluate trained models on a data split."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repulsive.cli.say import say


def evaluate(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs: of one run, or of all seeds of a recipe.")
    ],
    part: Annotated[
        str, typer.Option(help="Part of the data: test, dev, train, or the name of another test set.")
    ] = "test",
    data: Annotated[Path | None, typer.Option(help="Another prepared folder, with the same vocabulary.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda if available.")] = None,
    predict: Annotated[
        Path | None, typer.Option(help="GLUE only: write the predictions on the benchmark's test sets to this folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Evaluate the best weights of finished runs, and compare several runs with the first, seed by seed."""
    from repulsive.lab.engine.tables import as_json as to_json
    from repulsive.lab.engine.tables import as_markdown
    from repulsive.lab.runs.plan import check_device
    from repulsive.lab.runs.score import score

    check_device(device)
    if predict is not None:
        if len(runs) > 1:
            raise typer.BadParameter("one run at a time", param_hint="--predict")
        from repulsive.lab.runs.submission import predict as write

        for path in write(runs[0], predict, data, device):
            say(str(path))
        return
    rows = score(runs, part, data, device)
    say(to_json(rows) if as_json else as_markdown(rows))
