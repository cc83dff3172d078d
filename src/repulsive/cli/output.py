"""Printing for all verbs. Characters that control a terminal are replaced."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from repulsive.safety.terminal import one_line, printable
from repulsive.terminal.document import as_document
from repulsive.terminal.table import MarkdownText, Table, render

RequeueOption = Annotated[bool, typer.Option("--requeue", help="In a SLURM job: save and requeue the job on SIGUSR1.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
FullOption = Annotated[bool, typer.Option("--full", help="Show all columns, and 95 % confidence intervals.")]
MarkdownOption = Annotated[bool, typer.Option("--markdown", help="Print Markdown, for a file.")]


def print_text(text: str = "", *, err: bool = False) -> None:
    """Print text of one or more lines.

    Args:
        text: the text.
        err: print to stderr instead of stdout.
    """
    typer.echo(printable(text), err=err)


def print_progress(text: str) -> None:
    """Print a line of progress to stderr."""
    print_text(text, err=True)


def print_tables(blocks: Iterable[Table | MarkdownText | str]) -> None:
    """Print tables and paragraphs to stdout, as wide as the terminal."""
    typer.echo(render(blocks, sys.stdout))


def print_json(document: Any) -> None:
    """Print a value as the only JSON document on stdout."""
    print_text(as_document(document))


def print_error(message: object) -> None:
    """Print an error or a warning as one line on stderr, after the name of the command."""
    print(f"repulsive: {one_line(str(message))}", file=sys.stderr)


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print each warning as one line, without the source code it came from."""
    with warnings.catch_warnings():
        # torch warns that NumPy is missing; a verb that needs NumPy ends with an error that says so.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        warnings.showwarning = lambda message, *_: print_error(message)
        yield
