"""`repulsive evaluate RUN...`: evaluate trained models on a data split."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repulsive.cli.output import FullOption, JsonOption, MarkdownOption, print_json, print_text
from repulsive.cli.results import print_results


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
    full: FullOption = False,
    markdown: MarkdownOption = False,
    as_json: JsonOption = False,
) -> None:
    """Evaluate the best weights of finished runs, and compare several runs with the first, seed by seed."""
    from repulsive.lab.runs.plan import check_device
    from repulsive.lab.runs.score import score

    check_device(device)
    if predict is not None:
        if len(runs) > 1:
            raise typer.BadParameter("one run at a time", param_hint="--predict")
        from repulsive.lab.runs.submission import predict as write

        written = write(runs[0], predict, data, device)
        if as_json:
            print_json({"written": written})
        else:
            print_text("\n".join(map(str, written)))
        return
    print_results(score(runs, part, data, device), full=full, markdown=markdown, as_json=as_json)
