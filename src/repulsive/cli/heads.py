"""`repulsive heads TARGET`: list the attention heads of a model."""

from __future__ import annotations

from typing import Annotated

import typer

from repulsive.cli.output import JsonOption, print_json, print_tables


def heads(
    target: Annotated[
        str,
        typer.Argument(
            help="package.module:name of an nn.Module, of its class, or of a function that returns one; "
            "or a folder with the config.json of a transformers model (no weights needed); or the name of a model in "
            "the local Hugging Face cache."
        ),
    ],
    example: Annotated[
        str | None,
        typer.Option(
            help="package.module:name of inputs of the model: prove the layout on them, and find heads of unknown "
            "classes."
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Also show family, proof and weights per head.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the attention heads of a model, one line per group of heads."""
    from repulsive.diagnostics.head_listing import head_tables, heads_as_json
    from repulsive.diagnostics.loading.inputs import example_inputs
    from repulsive.diagnostics.loading.model import load_architecture, load_model
    from repulsive.heads import find_heads

    if example:
        model = load_model(target).model
        groups = find_heads(model, example_inputs(example, model))
    else:
        groups = find_heads(load_architecture(target))
    if as_json:
        print_json(heads_as_json(groups))
    else:
        print_tables(head_tables(groups, full))
