"""`repulsive export RUN`: what pre-training made, as a folder that transformers reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repulsive.cli.say import say


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run of pre-training that has ended.")],
    out: Annotated[Path, typer.Option(help="Folder to make.")],
) -> None:
    """Write the discriminator with its tokenizer, and the generator in a folder below, for `from_pretrained`."""
    from repulsive.lab.runs.export import export as write

    for folder in write(run, out):
        say(str(folder))
