"""Live page of the head monitor: warnings, and curves of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from repulsive.pages.data.panels import Panel
from repulsive.pages.html.document import asset, document, fact_list, header, write_whole
from repulsive.pages.html.panel import panel_section
from repulsive.pages.text import escaped


@dataclass(frozen=True)
class MonitorContent:
    """Content of the live page.

    Args:
        title: heading of the page.
        facts: (name, value) pairs at the top.
        warnings: messages, newest first.
        panels: charts; each panel has its own legend.
        reload_seconds: the page reloads itself after this many seconds; 0: it does not.
    """

    title: str
    facts: Sequence[tuple[str, str]] = ()
    warnings: Sequence[str] = ()
    panels: Sequence[Panel] = ()
    reload_seconds: int = 0


def write_monitor_page(path: str | Path, content: MonitorContent) -> Path:
    """Write the page atomically as one self-contained HTML file, and return its path."""
    return write_whole(path, render_monitor_page(content))


def render_monitor_page(content: MonitorContent) -> str:
    """Render the page as a string."""
    is_live = content.reload_seconds > 0
    lead = "Training is running." if is_live else "Training has ended."
    reload = (
        f'<p><label><input type="checkbox" id="reload" data-seconds="{content.reload_seconds}" checked> '
        f"reload this page every {content.reload_seconds} seconds</label></p>\n"
        if is_live
        else ""
    )
    body = header(content.title, lead) + reload + fact_list(content.facts) + _warnings(content.warnings)
    for panel in content.panels:
        methods = list(dict.fromkeys(series.method for chart in panel.charts for series in chart.series))
        body += panel_section(panel, methods)
    return document(content.title, body, script=asset("reload.js") if is_live else "")


def _warnings(messages: Sequence[str]) -> str:
    if not messages:
        return "<section><h2>Warnings</h2>\n<p>None so far.</p></section>\n"
    items = "".join(f'<p class="warn">{escaped(message)}</p>\n' for message in messages)
    return f"<section><h2>Warnings</h2>\n{items}</section>\n"
