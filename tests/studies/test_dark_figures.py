"""Figures of the site have dark colours for readers who prefer dark pages."""

import re
from pathlib import Path

from tests.scripts import study

ROOT = Path(__file__).resolve().parents[2]


def test_every_picture_of_the_site_follows_the_color_scheme():
    pages = " ".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    pictures = {ROOT / "docs" / link for link in re.findall(r"!\[[^\]]*\]\(([^)]+\.svg)\)", pages)}
    assert len(pictures) > 8
    assert [
        path.name for path in pictures if "prefers-color-scheme: dark" not in path.read_text(encoding="utf-8")
    ] == []


def test_only_colours_that_a_figure_has_are_changed(tmp_path):
    figure = tmp_path / "figure.svg"
    figure.write_text('<svg>\n <defs/>\n <defs>\n </defs><path style="fill: #ffffff; stroke: #123456"/></svg>')
    with study("studies.dark_figures") as dark_figures:
        dark_figures.follow_color_scheme(figure)
    text = figure.read_text()
    assert '[style*="fill: #ffffff"] { fill: #23262f !important }' in text
    assert "stroke" not in text.partition("</style>")[0] and "svg { fill: #f0f0f0 }" in text
    assert text.count("<style>") == 1 and text.index("</style>") < text.index("<defs>")
