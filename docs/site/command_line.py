"""Generate the command-line reference from the program's own help."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

PLACEHOLDER = "<!-- command line -->"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace the placeholder of a page by the reference."""
    return markdown.replace(PLACEHOLDER, reference()) if PLACEHOLDER in markdown else markdown


def reference() -> str:
    """Write a heading, a sentence and a table of arguments for every command."""
    import typer

    from repulsive.cli.app import app

    return "\n".join(_sections("", typer.main.get_command(app)))


def _sections(name: str, command: Any) -> Iterator[str]:
    if hasattr(command, "commands"):
        for verb in sorted(command.commands):
            yield from _sections(f"{name} {verb}", command.commands[verb])
        return
    context = command.make_context(name.strip(), [], resilient_parsing=True)
    rows = [record for parameter in command.params if (record := parameter.get_help_record(context))]
    yield from (f"## {name.strip()}", "", _cell((command.help or "").split("\n\n")[0]), "")
    if rows:
        yield from ("| argument | meaning |", "| --- | --- |")
        yield from (f"| `{names.strip()}` | {_cell(about)} |" for names, about in rows)
        yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
