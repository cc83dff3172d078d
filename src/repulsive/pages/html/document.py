"""HTML document: content security policy, style, script, page header, and writing the file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from repulsive.pages.text import escaped
from repulsive.safety import files as safe

_LONG_FACT = 28  # characters; longer facts get a wider box


def document(title: str, body: str, *, script: str = "", style: str = "", has_pictures: bool = False) -> str:
    """Assemble a self-contained HTML document that loads nothing from outside.

    Args:
        title: page title.
        body: markup of the body up to the end of `<main>`, with all data escaped.
        script: the only script that the policy allows to run; "" allows none.
        style: style sheet; "" for that of reports.
        has_pictures: the page contains pictures as data URLs.
    """
    style = style or asset("page.css")
    allowed = f"script-src '{_digest(script)}'; " if script else ""
    trusted = "; require-trusted-types-for 'script'; trusted-types 'none'" if script else ""
    pictures = "img-src data:; " if has_pictures else ""
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; {allowed}{pictures}base-uri 'none'; "
        f"form-action 'none'{trusted}"
    )
    run = f"<script>{script}</script>\n" if script else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f"<title>{escaped(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n{body}</main>\n{run}"
        "</body>\n</html>\n"
    )


def header(title: str, lead: str = "", facts: Sequence[tuple[str, str]] = (), *, lead_class: str = "lead") -> str:
    """Render the page header and open `<main>`.

    Args:
        title: heading of the page.
        lead: paragraph below it.
        facts: (name, value) pairs below the paragraph.
        lead_class: CSS class of the paragraph.
    """
    paragraph = f'<p class="{lead_class}">{escaped(lead)}</p>\n' if lead else ""
    return f"<header>\n<h1>{escaped(title)}</h1>\n{paragraph}{fact_list(facts)}</header>\n<main>\n"


def fact_list(facts: Sequence[tuple[str, str]]) -> str:
    """Render (name, value) pairs in a box; "" for no facts."""
    items = ""
    for name, value in facts:
        wide = ' class="wide"' if len(value) > _LONG_FACT else ""
        items += f"<div{wide}><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>"
    return f'<dl class="facts">{items}</dl>\n' if items else ""


def folded(title: str, body: str, *, is_open: bool = False) -> str:
    """Render a section that unfolds when its title is selected.

    Args:
        title: plain text.
        body: markup.
        is_open: unfolded at first.
    """
    opened = " open" if is_open else ""
    return f'<details class="fold"{opened}><summary><h3>{escaped(title)}</h3></summary>\n{body}</details>\n'


def write_whole(path: str | Path, page: str) -> Path:
    """Write a page atomically: readers see either the old page or the new one, never a part.

    Args:
        path: the HTML file; its folder is created.
        page: the document.

    Returns:
        The path written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    safe.write_whole(path, page.encode())
    return path


def asset(name: str) -> str:
    """Read a style sheet or script from this package."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
