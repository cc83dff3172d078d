"""What a verb prints: the one way to stdout and stderr, which lets nothing through that acts on a terminal."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from repulsive.safety.terminal import one_line, printable


def say(text: str = "", *, err: bool = False) -> None:
    """Print a text.

    Args:
        text: of one line or more.
        err: to stderr.
    """
    typer.echo(printable(text), err=err)


def complain(message: object) -> None:
    """Print one line to stderr, in the name of the command."""
    print(f"repulsive: {one_line(str(message))}", file=sys.stderr)


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """One line for a warning, without the code it came from."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: complain(message)
        yield
