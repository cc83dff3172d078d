"""`repulsive translate RUN < in > out`: translate stdin line by line."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from repulsive.cli.output import print_error
from repulsive.safety.terminal import printable


def translate(
    run: Annotated[Path, typer.Argument(help="Folder of a finished translation run.")],
    beam: Annotated[int | None, typer.Option(help="Beam size; default: that of the recipe.")] = None,
    nbest: Annotated[
        int, typer.Option(help="Translations per line; if more than 1, print line number, score and text.")
    ] = 1,
    lenpen: Annotated[
        float | None,
        typer.Option(help="Length penalty: scores are log p / length^lenpen. Default: that of the recipe."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Number of lines to translate at once.", min=1)] = 64,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda if available.")] = None,
) -> None:
    """Translate stdin to stdout, line by line. Empty lines stay empty."""
    from repulsive.lab.runs.plan import check_device
    from repulsive.lab.runs.translate import open_translator
    from repulsive.lab.systems.translation.translate import translate_lines

    check_device(device)
    model, pieces, search = open_translator(run, device, beam=beam, lenpen=lenpen, nbest=nbest)
    out = sys.stdout.buffer  # UTF-8 in every locale
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print_error(message)
        shown = printable if out.isatty() else str  # files get the unchanged translation
        translations = translate_lines(model, pieces, _lines(sys.stdin.buffer), search, nbest=nbest, at_once=batch)
        try:
            for number, best in enumerate(translations, 1):
                rows = (text if nbest == 1 else f"{number}\t{score:.4f}\t{text}" for text, score in best)
                out.write("".join(f"{shown(row)}\n" for row in rows).encode("utf-8", "replace"))
                if number % batch == 0:
                    out.flush()
            out.flush()
        except BrokenPipeError:  # the reader closed the pipe; without this, Python reports the error again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _lines(file: BinaryIO) -> Iterator[str]:
    from repulsive.errors import DataError

    for number, raw in enumerate(file, 1):
        try:
            yield raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise DataError(
                f"line {number} of the input: byte {error.start} is not UTF-8; convert the input first"
            ) from None
