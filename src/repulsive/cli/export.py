"""`repulsive export RUN`: export a pre-trained model to the format of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repulsive.cli.output import print_text


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a finished pre-training run.")],
    out: Annotated[Path, typer.Option(help="Output folder.")],
) -> None:
    """Export an ELECTRA discriminator with its tokenizer, and the generator in a subfolder, for `from_pretrained`."""
    from repulsive.lab.runs.export import export as write

    for folder in write(run, out):
        print_text(str(folder))
