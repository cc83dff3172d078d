"""`repulsive judge make | tally`: blind human judgement of two systems' texts."""

from __future__ import annotations

from os.path import realpath
from pathlib import Path
from typing import Annotated

import typer

from repulsive.cli.say import say

judge = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@judge.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    """Have people compare the texts of two systems without knowing which is which."""
    if context.invoked_subcommand is None:
        say(context.get_help())


@judge.command()
def make(
    first: Annotated[Path, typer.Argument(metavar="A.jsonl", help="Texts of the system whose wins are counted.")],
    second: Annotated[Path, typer.Argument(metavar="B.jsonl", help="Texts of the other; equal ids belong together.")],
    out: Annotated[Path, typer.Option(help="The page; its key is written beside it.")] = Path("judge.html"),
    count: Annotated[int, typer.Option(min=1, help="Pairs to judge, drawn by the seed.")] = 50,
    seed: Annotated[int, typer.Option(help="Of the draw, the order and the sides.")] = 0,
    title: Annotated[str, typer.Option(help="Of the page.", show_default=False)] = "",
) -> None:
    """Write a page for judges: pairs of texts in random order, on random sides, without names."""
    from repulsive.lab.judge.blind import TITLE
    from repulsive.lab.judge.make import make as write

    made = write(first, second, out, count=count, seed=seed, title=title or TITLE)
    for path, lost in ((first, made.only_first), (second, made.only_second)):
        if lost:
            say(f"{lost} {'id is' if lost == 1 else 'ids are'} in {path} alone and left out", err=True)
    if made.equal:
        say(f"{made.equal} of the pairs shown have two equal texts", err=True)
    say(f"{made.shown} of {made.pairs} pairs, {made.systems[0]} against {made.systems[1]}")
    say(f"written to {made.page}: send it to the judges")
    say(f"written to {made.key}: keep it to yourself until all have answered")


@judge.command()
def tally(
    files: Annotated[list[Path], typer.Argument(metavar="ANSWERS...", help="Files that judges saved.")],
    key: Annotated[Path, typer.Option(help="What `make` wrote beside the page.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Count wins, losses and ties, as in the paper's table of human judgements."""
    from repulsive.lab.judge.answers import read_all
    from repulsive.lab.judge.key import read_key
    from repulsive.lab.judge.tally import as_json as to_json
    from repulsive.lab.judge.tally import as_markdown
    from repulsive.lab.judge.tally import tally as count

    opened = read_key(key)
    answers = [path for path in files if realpath(path) != realpath(key)]  # `*.json` finds the key too
    found = count(opened, read_all(answers, opened))
    say(to_json(found) if as_json else as_markdown(found))
