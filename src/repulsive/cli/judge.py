"""`repulsive judge make | tally`: blind human evaluation of two systems."""

from __future__ import annotations

from dataclasses import asdict
from os.path import realpath
from pathlib import Path
from typing import Annotated

import typer

from repulsive.cli.output import FullOption, JsonOption, MarkdownOption, print_json, print_tables, print_text

judge = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@judge.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    """Let people compare the texts of two systems without knowing which is which."""
    if context.invoked_subcommand is None:
        print_text(context.get_help())


@judge.command()
def make(
    first: Annotated[Path, typer.Argument(metavar="A.jsonl", help="Texts of the system whose wins are counted.")],
    second: Annotated[Path, typer.Argument(metavar="B.jsonl", help="Texts of the other system, with the same ids.")],
    out: Annotated[Path, typer.Option(help="HTML page to write; the key is written beside it.")] = Path("judge.html"),
    count: Annotated[int, typer.Option(min=1, help="Number of pairs to judge, drawn at random.")] = 50,
    seed: Annotated[int, typer.Option(help="Random seed for pairs, order and sides.")] = 0,
    title: Annotated[str, typer.Option(help="Title of the page.", show_default=False)] = "",
    as_json: JsonOption = False,
) -> None:
    """Write a page for judges: pairs of texts in random order, on random sides, without system names."""
    from repulsive.lab.judge.blind import TITLE
    from repulsive.lab.judge.make import make as write

    result = write(first, second, out, count=count, seed=seed, title=title or TITLE)
    for path, ignored in ((first, result.only_first), (second, result.only_second)):
        if ignored:
            print_text(f"ignored {ignored} {'id' if ignored == 1 else 'ids'} that only {path} has", err=True)
    if result.equal:
        print_text(f"{result.equal} of the {result.shown} pairs have two equal texts", err=True)
    if as_json:
        print_json(asdict(result))
        return
    print_text(f"{result.shown} of {result.pairs} pairs, {result.systems[0]} versus {result.systems[1]}")
    print_text(f"written to {result.page}: send it to the judges")
    print_text(f"written to {result.key}: keep it secret until all judges have answered")


@judge.command()
def tally(
    files: Annotated[list[Path], typer.Argument(metavar="ANSWERS...", help="Files saved by the judges.")],
    key: Annotated[Path, typer.Option(help="Key that `make` wrote beside the page.")],
    full: FullOption = False,
    markdown: MarkdownOption = False,
    as_json: JsonOption = False,
) -> None:
    """Count wins, losses and ties, as in the paper's Table 5."""
    from repulsive.lab.judge.answers import read_all
    from repulsive.lab.judge.key import read_key
    from repulsive.lab.judge.tally import as_data, as_markdown, terminal_tables
    from repulsive.lab.judge.tally import tally as count

    opened = read_key(key)
    answers = [path for path in files if realpath(path) != realpath(key)]  # the pattern *.json matches the key, too
    result = count(opened, read_all(answers, opened))
    if as_json:
        print_json(as_data(result))
    elif markdown:
        print_text(as_markdown(result))
    else:
        print_tables(terminal_tables(result, full))
