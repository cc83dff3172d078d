"""What every page has: a head that locks it by a content security policy, its style, and a file that is whole."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from repulsive.pages.text import escaped
from repulsive.safety import files as safe


def document(title: str, body: str, *, script: str = "", style: str = "") -> str:
    """One HTML document that asks for nothing outside of itself.

    Args:
        title: of the page.
        body: its markup, data escaped.
        script: the one script that may run; "": none may.
        style: of the page; "": that of reports.
    """
    style = style or asset("page.css")
    allowed = f"script-src '{_digest(script)}'; " if script else ""
    trusted = "; require-trusted-types-for 'script'; trusted-types 'none'" if script else ""
    policy = f"default-src 'none'; style-src '{_digest(style)}'; {allowed}base-uri 'none'; form-action 'none'{trusted}"
    run = f"<script>{script}</script>\n" if script else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f"<title>{escaped(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n{body}</main>\n{run}"
        "</body>\n</html>\n"
    )


def header(title: str, lead: str = "", facts: Sequence[tuple[str, str]] = ()) -> str:
    """The top of the page, and the start of its main part."""
    led = f'<p class="lead">{escaped(lead)}</p>\n' if lead else ""
    items = ""
    for name, value in facts:
        room = ' class="wide"' if len(value) > 28 else ""
        items += f"<div{room}><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>"
    listed = f'<dl class="facts">{items}</dl>\n' if items else ""
    return f"<header>\n<h1>{escaped(title)}</h1>\n{led}{listed}</header>\n<main>\n"


def write_whole(path: str | Path, page: str) -> Path:
    """Write a page aside and rename it: whoever opens `path` meanwhile sees the old page or the new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    safe.write_whole(path, page.encode())
    return path


def asset(name: str) -> str:
    """A file beside this one."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
