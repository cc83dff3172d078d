"""`repulsive inspect TARGET`: measure similarity and redundancy of the heads of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repulsive.cli.say import say, say_tables
from repulsive.errors import RunError


def inspect(
    target: Annotated[
        str,
        typer.Argument(
            help="Folder of a transformers model (config, weights, tokenizer); or package.module:name of an nn.Module, "
            "of its class, or of a function that returns one."
        ),
    ],
    text: Annotated[
        Path | None, typer.Option(help="Text file with one sentence per line, UTF-8. No labels are needed.")
    ] = None,
    sentence: Annotated[list[str] | None, typer.Option(help="A sentence to read; repeatable.")] = None,
    example: Annotated[
        str,
        typer.Option(
            help="package.module:name of example inputs, for models that do not read text.", show_default=False
        ),
    ] = "",
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Ablate each head in turn; needs one pass over the text per head.")
    ] = False,
    random: Annotated[
        bool, typer.Option("--random", help="Use random weights instead of those in the model folder.")
    ] = False,
    twins: Annotated[
        int, typer.Option(min=0, help="Number of untrained models of the same architecture to compare with.")
    ] = 3,
    most: Annotated[int, typer.Option(min=1, help="Maximum number of sentences to read.")] = 32,
    length: Annotated[
        int, typer.Option(min=2, help="Maximum number of tokens per sentence; longer sentences are cut.")
    ] = 128,
    out: Annotated[Path, typer.Option(help="Output folder for inspect.html and inspect.json.")] = Path("."),
    full: Annotated[bool, typer.Option("--full", help="Print a table of every layer and measure.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the content of inspect.json to stdout instead of tables.")
    ] = False,
) -> None:
    """Measure how similar the heads of a model are, and which are redundant."""
    from repulsive.diagnostics.inspection import inspect_heads
    from repulsive.diagnostics.loading.inputs import example_inputs, read_sentences, tokenize
    from repulsive.diagnostics.loading.model import load_model
    from repulsive.diagnostics.short_summary import short_summary
    from repulsive.diagnostics.summary import as_text
    from repulsive.pages.inspection_page import inspection_json, write_inspection_files

    if example and (text or sentence):
        raise typer.BadParameter("use text or --example, not both", param_hint="--example")
    if ablate and not (text or sentence or example):
        raise typer.BadParameter("needs inputs: add --text, --sentence or --example", param_hint="--ablate")
    sentences = read_sentences(text, sentence or [], most)
    _make_folder(out)
    loaded = load_model(target, random=random)
    reading = tokenize(loaded, sentences, length) if sentences else None
    batches = reading.batches if reading else [example_inputs(example, loaded.model)] if example else []
    separator = getattr(loaded.tokenizer, "sep_token_id", None)
    found = inspect_heads(
        loaded.model,
        batches,
        ablation=ablate,
        twins=twins,
        separators=[] if separator is None else [separator],
        progress=_show_progress,
    )
    if as_json or full:
        say(inspection_json(found) if as_json else as_text(found))
    else:
        say_tables(short_summary(found))
    if not batches:
        say(
            "\nnote: without inputs only weights are measured; add --text, --sentence or --example to measure the "
            "similarity of logits, attention and outputs, and the importance of heads",
            err=as_json,
        )
    facts = [("Model", target), ("Weights", "random" if random else "as loaded"), ("Inputs read", str(found.items))]
    facts += [("Decoder", "read the same sentences as the encoder")] if reading and reading.decoder_reads_source else []
    page = write_inspection_files(
        out, found, title=f"Heads of {target}", facts=facts, tokens=reading.tokens if reading else []
    )
    say(f"\nwritten to {page}", err=as_json)


def _show_progress(done: int, total: int) -> None:
    if done == total or done % max(1, total // 10) == 0:
        say(f"ablated {done} of {total} heads", err=True)


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"--out {str(out)!r}: cannot be created ({error.strerror}); choose another folder") from None
