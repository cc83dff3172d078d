"""The reference of the command line, made from the program itself: no option is written down twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MARK = "<!-- command line -->"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Put the verbs where a page asks for them."""
    return markdown.replace(MARK, reference()) if MARK in markdown else markdown


def reference() -> str:
    """A heading, a sentence and a table for every verb."""
    import typer

    from repulsive.cli.app import app

    return "\n".join(_verbs("", typer.main.get_command(app)))


def _verbs(name: str, command: Any) -> Iterator[str]:
    if hasattr(command, "commands"):
        for verb in sorted(command.commands):
            yield from _verbs(f"{name} {verb}", command.commands[verb])
        return
    context = command.make_context(name.strip(), [], resilient_parsing=True)
    rows = [found for parameter in command.params if (found := parameter.get_help_record(context))]
    yield from (f"## {name.strip()}", "", _cell((command.help or "").split("\n\n")[0]), "")
    if rows:
        yield from ("| argument | what it is |", "| --- | --- |")
        yield from (f"| `{names.strip()}` | {_cell(about)} |" for names, about in rows)
        yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
