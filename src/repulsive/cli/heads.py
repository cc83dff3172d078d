"""`repulsive heads TARGET`: which heads a model has."""

from __future__ import annotations

from typing import Annotated

import typer

from repulsive.cli.say import say


def heads(
    target: Annotated[
        str,
        typer.Argument(
            help="package.module:name of an nn.Module, its class or a function that builds it; "
            "or a folder with a transformers config.json (no weights needed)."
        ),
    ],
) -> None:
    """Print the attention heads of a model: one line per group of heads."""
    from repulsive.diagnostics.loading.model import load_architecture
    from repulsive.heads import describe, find_heads

    say(describe(find_heads(load_architecture(target))))
