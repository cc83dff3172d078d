"""Printing for all verbs. Characters that control a terminal are replaced."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from repulsive.safety.terminal import one_line, printable


def say(text: str = "", *, err: bool = False) -> None:
    """Print text of one or more lines.

    Args:
        text: the text.
        err: print to stderr instead of stdout.
    """
    typer.echo(printable(text), err=err)


def complain(message: object) -> None:
    """Print an error or a warning as one line on stderr, after the name of the command."""
    print(f"repulsive: {one_line(str(message))}", file=sys.stderr)


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print each warning as one line, without the source code it came from."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: complain(message)
        yield
