"""`repulsive inspect TARGET`: are the heads of a model diverse, and which could go?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from repulsive.cli.say import say
from repulsive.errors import RunError

if TYPE_CHECKING:
    from repulsive.diagnostics.inspection import Inspection


def inspect(
    target: Annotated[
        str,
        typer.Argument(
            help="Folder of a transformers model (config, weights, tokenizer); or package.module:name of an nn.Module, "
            "its class or a function that builds it."
        ),
    ],
    text: Annotated[Path | None, typer.Option(help="File with one sentence a line, UTF-8.")] = None,
    sentence: Annotated[list[str] | None, typer.Option(help="A sentence; may be given several times.")] = None,
    example: Annotated[
        str, typer.Option(help="package.module:name of inputs for a model that reads no text.", show_default=False)
    ] = "",
    ablate: Annotated[bool, typer.Option("--ablate", help="Take each head away: a pass over the text each.")] = False,
    random: Annotated[
        bool, typer.Option("--random", help="Fill a model folder at random, not by its weights.")
    ] = False,
    twins: Annotated[
        int, typer.Option(min=0, help="Compare with so many untrained models of the same architecture; 0: none.")
    ] = 3,
    most: Annotated[int, typer.Option(min=1, help="Read at most so many sentences.")] = 32,
    length: Annotated[int, typer.Option(min=2, help="Cut sentences at so many tokens.")] = 128,
    out: Annotated[Path, typer.Option(help="Folder for inspect.html and inspect.json.")] = Path("."),
) -> None:
    """Print how alike the heads of a model are, and which are redundant; text needs no labels."""
    from repulsive.diagnostics.inspection import inspect_heads
    from repulsive.diagnostics.loading.subject import example_inputs, load_subject, read_sentences, tokenized
    from repulsive.diagnostics.summary import as_text

    if example and (text or sentence):
        raise typer.BadParameter("give text or --example, not both", param_hint="--example")
    if ablate and not (text or sentence or example):
        raise typer.BadParameter("there is nothing to read; add --text, --sentence or --example", param_hint="--ablate")
    sentences = read_sentences(text, sentence or [], most)
    _check_place(out)
    subject = load_subject(target, random=random)
    reading = tokenized(subject, sentences, length) if sentences else None
    batches = reading.batches if reading else [example_inputs(example, subject.model)] if example else []
    found = inspect_heads(subject.model, batches, ablation=ablate, twins=twins, progress=_say)
    say(as_text(found))
    if not batches:
        say(
            "\nnote: weights alone; inputs (--text, --sentence or --example) also show how alike heads are in "
            "logits, attention and outputs, and how important they are"
        )
    facts = [("Model", target), ("Weights", "random" if random else "as loaded"), ("Inputs read", str(found.items))]
    facts += [("Decoder", "read the same sentences as the encoder")] if reading and reading.twice else []
    page = _write(out, found, f"Heads of {target}", facts, reading.tokens if reading else [])
    say(f"\nwritten to {page}")


def _say(done: int, of: int) -> None:
    if done == of or done % max(1, of // 10) == 0:
        say(f"ablated {done} of {of} heads", err=True)


def _check_place(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"--out {str(out)!r}: no folder can be made there ({error.strerror}); choose another") from None


def _write(out: Path, found: Inspection, title: str, facts: list[tuple[str, str]], tokens: list[list[str]]) -> Path:
    import json

    from repulsive.diagnostics.summary import as_json
    from repulsive.pages.inspection_page import write_inspection
    from repulsive.safety.files import write_whole

    try:
        page = write_inspection(out / "inspect.html", found, title=title, facts=facts, tokens=tokens)
        write_whole(out / "inspect.json", json.dumps(as_json(found), indent=1, allow_nan=False).encode())
    except OSError as error:
        raise RunError(f"--out {str(out)!r}: cannot be written ({error.strerror}); choose another") from None
    return page
