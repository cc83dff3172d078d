"""Write the results of studies: JSON, Markdown and SVG."""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from repulsive.errors import ConfigError
from repulsive.lab.engine.files import read_json
from repulsive.lab.engine.run_reader import RUN
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.tables import Row, as_plain
from repulsive.pages import Content
from repulsive.pages.data.panels import Chart
from repulsive.pages.figures.write import check_matplotlib, write_figures
from repulsive.terminal.document import finite


def save(path: Path, value: Any) -> None:
    """Write a text, or a value as JSON; make the folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(finite(value), indent=1, default=str) + "\n")


def update_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object by dataset; entries of other datasets stay in the file."""
    stored = json.loads(path.read_text()) if path.is_file() else {}
    save(path, stored | value)


def rows_as_data(rows: Sequence[Row], runs: Sequence[RunFolder]) -> dict[str, Any]:
    """Convert rows to plain values for JSON, with the device, the versions and the time of their runs."""
    return {
        **{key: read_json(runs[0].path / RUN)["started"][key] for key in ("device", "versions")},
        "seconds_a_run": statistics.median((run.result or {})["seconds"] for run in runs),
        "rows": [as_plain(row) | {"folder": row.folder.name} for row in rows],
    }


def list_settings(rows: Sequence[Any]) -> list[str]:
    """List, as Markdown lines, what each row changes in its recipe; of repeated keys the last counts.

    Args:
        rows: each with a `label` and `changes`.
    """
    lines = []
    for row in rows:
        last = dict(change.split("=", 1) for change in row.changes)
        lines.append(f"- {row.label}: {', '.join(f'{key}={value}' for key, value in last.items()) or 'as the recipe'}")
    return ["Settings:", "", *lines]


def write_svgs(charts: Sequence[Chart], folder: Path) -> None:
    """Write charts as SVG; without Matplotlib print a message instead."""
    write_content_svgs(Content("", charts=charts), folder)


def write_content_svgs(content: Content, folder: Path) -> None:
    """Write all charts and attention maps of a page as SVG; without Matplotlib print a message instead."""
    try:
        check_matplotlib()
    except ConfigError as error:
        print(error)
        return
    with tempfile.TemporaryDirectory() as temporary:
        for path in write_figures(Path(temporary), content):
            if path.suffix == ".svg":
                shutil.copy(path, folder)
