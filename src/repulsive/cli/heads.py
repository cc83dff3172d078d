"""`repulsive heads TARGET`: list the attention heads of a model."""

from __future__ import annotations

from typing import Annotated

import typer

from repulsive.cli.say import say


def heads(
    target: Annotated[
        str,
        typer.Argument(
            help="package.module:name of an nn.Module, of its class, or of a function that returns one; "
            "or a folder with the config.json of a transformers model (no weights needed); or the name of a model in "
            "the local Hugging Face cache."
        ),
    ],
) -> None:
    """List the attention heads of a model, one line per group of heads."""
    from repulsive.diagnostics.loading.model import load_architecture
    from repulsive.heads import describe, find_heads

    say(describe(find_heads(load_architecture(target))))
