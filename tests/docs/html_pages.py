"""Reading a built site: what its pages ask for, link to, and have anchors for."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ASSETS = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}


@dataclass
class Page(HTMLParser):
    """One page."""

    path: Path
    assets: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag in ASSETS and ASSETS[tag] in found:
            self.assets.append(found[ASSETS[tag]])
        if tag == "a" and "href" in found:
            self.links.append(found["href"])


def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def is_external(address: str) -> bool:
    split = urlsplit(address)
    return bool(split.netloc) or split.scheme not in ("", "data")


def dead_links(found: dict[Path, Page]) -> list[str]:
    """Links and assets within the site that lead to no file, or to an anchor that the page has not."""
    dead = []
    for path, page in found.items():
        if path.name == "404.html":
            continue  # for web servers, and absolute because they show it anywhere
        for address in [*page.links, *page.assets]:
            if is_external(address):
                continue
            split = urlsplit(address)
            target = (path.parent / unquote(split.path)).resolve() if split.path else path
            if target.is_dir():
                target = target / "index.html"
            anchor = unquote(split.fragment)
            if not target.is_file():
                dead.append(f"{path.name}: {address}")
            elif anchor and target in found and anchor not in found[target].anchors:
                dead.append(f"{path.name}: {address} (no such anchor)")
    return dead
