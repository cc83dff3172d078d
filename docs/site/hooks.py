"""MkDocs hooks: formulas as MathML, and pages for files of the repository outside docs/."""

from __future__ import annotations

import functools
import html
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OUTSIDE = "repository"  # folder of the site for files outside docs/
WIDE = ("replication.md", "replication-details.md")  # pages whose tables need the width of the table of contents

LINK = re.compile(r"(!?\[[^\]]*\])\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"(^ *```.*?^ *```[^\n]*$)", re.M | re.S)
INTERVAL = re.compile(r"(?<=[ >])\[[+-]?\d[^\[\]<>]*, [^\[\]<>]*\]")
CELL = re.compile(r"<td[^>]*>.*?</td>", re.S)
MATH = re.compile(r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<tex>.*?)\\[)\]]</(?P=tag)>', re.S)


# -- pages and files outside docs/ ----------------------------------------------------------------------------------


def on_files(files: Files, config: Any) -> Files:
    """Add every repository file that the navigation or a page links to, and the files that those link to."""
    waiting = [DOCS / file.src_uri for file in files.documentation_pages()]
    waiting += [_file_of(uri) for uri in _uris(config.nav) if uri.startswith(f"{OUTSIDE}/")]
    visited: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in visited:
            continue
        visited.add(path)
        if path.suffix in (".md", ".ipynb"):
            text = _markdown(path)
            waiting += [target for target in _linked(path, text) if target is not None]
            if not path.is_relative_to(DOCS):
                files.append(File.generated(config, _uri_of(path), content=text))
        elif files.get_file_from_path(_uri_of(path)) is None:
            files.append(File.generated(config, _uri_of(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite links between repository files as links of the site, and set what pages show and what search finds."""
    if page.file.src_uri.startswith(f"{OUTSIDE}/results/"):
        page.meta["search"] = {"exclude": True}  # tables of numbers would bury the documentation
    if page.file.src_uri in WIDE or _is_table(page.file.src_uri):
        page.meta["hide"] = ["toc"]
    path = _file_of(page.file.src_uri)

    def on_site(match: re.Match[str]) -> str:
        target = _target(path, match[2])
        if target is None:
            return match[0]  # MkDocs itself warns about broken links
        link = posixpath.relpath(_uri_of(target), posixpath.dirname(page.file.src_uri))
        return f"{match[1]}({link}{match[3] or ''})"

    pieces = FENCE.split(markdown)  # text, code, text, ...
    return "".join(piece if i % 2 else LINK.sub(on_site, piece) for i, piece in enumerate(pieces))


def _is_table(uri: str) -> bool:
    """Whether a page is one of the tables of results, which need all the width there is."""
    return uri.startswith(f"{OUTSIDE}/results/") and not uri.endswith("/README.md")


def _linked(path: Path, text: str) -> Iterator[Path | None]:
    return (_target(path, match[2]) for piece in FENCE.split(text)[::2] for match in LINK.finditer(piece))


def _target(path: Path, link: str) -> Path | None:
    """Resolve a link in `path` to an existing file of the repository, or None; a folder means its README."""
    target = (path.parent / link).resolve()
    if target.is_dir():
        target = target / "README.md"
    if target == ROOT / "README.md":
        target = DOCS / "index.md"
    return target if target.is_file() and target.is_relative_to(ROOT) else None


def _uri_of(path: Path) -> str:
    if path.is_relative_to(DOCS) and path.suffix != ".py":  # scripts are not pages
        return path.relative_to(DOCS).as_posix()
    where = path.relative_to(ROOT)
    return f"{OUTSIDE}/{(where.with_suffix('.md') if path.suffix == '.ipynb' else where).as_posix()}"


def _file_of(uri: str) -> Path:
    if not uri.startswith(f"{OUTSIDE}/"):
        return DOCS / uri
    path = ROOT / uri.removeprefix(f"{OUTSIDE}/")
    return path if path.is_file() else path.with_suffix(".ipynb")


def _uris(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from _uris(entry)


def _markdown(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    return _notebook(path, json.loads(text)) if path.suffix == ".ipynb" else text


def _notebook(path: Path, notebook: dict[str, Any]) -> str:
    """Convert a notebook to Markdown: its texts, its code, the stored printed output, and its figure."""
    pieces = []
    picture = DOCS / "pictures" / f"notebook-{path.stem}.svg"  # drawn by docs/pictures/notebooks.py
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        pieces.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
        for output in cell.get("outputs", []):
            if output["output_type"] == "stream":
                pieces.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
        if cell["cell_type"] == "code" and "plt.show()" in source and picture.is_file():
            pieces.append(f"![Figure drawn by the code above]({posixpath.relpath(picture, path.parent)})")
    return "\n\n".join(pieces) + "\n"


# -- accessibility -----------------------------------------------------------------------------------------------------


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Name the search dialogue for screen readers."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"', 1)


# -- tables and formulas --------------------------------------------------------------------------------------------


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    """Convert formulas to MathML, which browsers render without scripts or fonts, and mark intervals in tables."""
    content = CELL.sub(lambda cell: INTERVAL.sub(r'<span class="interval">\g<0></span>', cell[0]), content)
    return MATH.sub(lambda match: _mathml(match["tex"], match["tag"] == "div"), content)


@functools.cache
def _mathml(tex: str, block: bool) -> str:
    mathml: str = convert(html.unescape(tex).strip(), display="block" if block else "inline")
    return re.sub(r'(<math) xmlns="[^"]*"', r"\1", mathml)
