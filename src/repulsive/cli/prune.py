"""`repulsive prune MODEL`: remove heads and write an ordinary checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repulsive.cli.output import JsonOption, print_json, print_progress, print_tables, print_text


def prune(
    model: Annotated[
        str,
        typer.Argument(
            help="Folder of a transformers model with weights and a tokenizer, or its name in the Hugging Face cache."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to create for the pruned model.")],
    text: Annotated[Path | None, typer.Option(help="UTF-8 file, one sentence per line, to score heads on.")] = None,
    sentence: Annotated[list[str] | None, typer.Option(help="A sentence; may be given several times.")] = None,
    test: Annotated[Path | None, typer.Option(help="Held-out text to measure on, one sentence per line.")] = None,
    keep: Annotated[str, typer.Option(help="Share of the heads to keep in every layer, such as 75%.")] = "75%",
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key-value heads to keep in every layer.")] = None,
    border: Annotated[
        int, typer.Option(min=0, help="Heads on each side of the cut to ablate one by one; 0: gradient scores only.")
    ] = 2,
    recover: Annotated[int, typer.Option(min=0, help="Train this many steps on the text after pruning.")] = 0,
    learning_rate: Annotated[float, typer.Option(min=0, help="Learning rate of --recover.")] = 5e-5,
    most: Annotated[int, typer.Option(min=1, help="Read at most this many sentences.")] = 256,
    length: Annotated[
        int, typer.Option(min=2, help="Maximum number of tokens per sentence; longer sentences are cut.")
    ] = 128,
    full: Annotated[bool, typer.Option("--full", help="Also show cache and range of times.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove the least important heads of a model and write a checkpoint that plain transformers loads.

    Heads are scored on --text, without labels; quality is measured on --test, or else on the same text.

    Every layer keeps the same number of heads. The pruned model is compared with the ablated one before it is written.
    """
    from repulsive.diagnostics.loading.inputs import read_sentences, tokenize
    from repulsive.diagnostics.loading.model import load_model
    from repulsive.diagnostics.pruned_checkpoint import as_json as as_data
    from repulsive.diagnostics.pruned_checkpoint import check_empty, prune_model, terminal_tables, write_checkpoint
    from repulsive.terminal.progress import progress_bar

    share = _share(keep)
    if text is None and not sentence:
        raise typer.BadParameter("give the text to score heads on: --text FILE or --sentence TEXT", param_hint="--text")
    check_empty(out)
    sentences = read_sentences(text, sentence or [], most)
    test_sentences = read_sentences(test, [], most) if test else []
    loaded = load_model(model)
    read = tokenize(loaded, sentences, length)
    held_out = tokenize(loaded, test_sentences, length) if test else None
    for name, each in (("text to score heads on", read), ("held-out text", held_out)):
        if each and each.cut:
            print_progress(f"note: {name}: cut {each.cut} (--length)")
    with progress_bar() as bar:
        result = prune_model(
            loaded,
            read.batches,
            share,
            test=held_out.batches if held_out else None,
            kv_heads=kv_heads,
            border=border,
            recover=recover,
            learning_rate=learning_rate,
            progress=print_progress,
            bar=bar,
        )
    write_checkpoint(result, loaded.tokenizer, out, model)
    if as_json:
        print_json(as_data(result, model))
        return
    print_tables(terminal_tables(result, full))
    print_text(f"\nwritten to {out}; load it with {type(result.model).__name__}.from_pretrained({str(out)!r})")


def _share(keep: str) -> float:
    """Parse the share of heads to keep: "75%" or "0.75" -> 0.75."""
    try:
        value = float(keep.removesuffix("%")) / (100 if keep.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise typer.BadParameter(f"{keep!r}: expected a share between 0% and 100%, such as 75%", param_hint="--keep")
    return value
