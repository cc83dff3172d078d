"""`repulsive evaluate RUN...`: what trained weights do on a part of the data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repulsive.cli.say import say


def evaluate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs: one, or one with seeds.")],
    part: Annotated[str, typer.Option(help="test, dev, train or a further test set.")] = "test",
    data: Annotated[Path | None, typer.Option(help="Another prepared folder, of the same vocabulary.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = None,
    predict: Annotated[
        Path | None, typer.Option(help="glue: write the answers to the benchmark's test sets into this folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Evaluate the best weights of finished runs again; several are compared with the first, seed by seed."""
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
    found = score(runs, part, data, device)
    say(to_json(found) if as_json else as_markdown(found))
