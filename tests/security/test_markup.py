"""Markup in data is shown as text on every page."""

import dataclasses
import json
from html.parser import HTMLParser

from repulsive.lab.judge.make import make
from repulsive.pages import render_page
from repulsive.pages.sample_table import Sample, samples_html
from repulsive.pages.text import escaped, script_json
from tests.pages.sample import sample_content

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"' onload='alert(1)' <!--\u202e&lt;"
CHOICES = ("better", "mark", "over")  # fields that are one of a few words
ALLOWED = {  # elements of our pages; any other element comes from data
    "html",
    "head",
    "meta",
    "title",
    "style",
    "script",
    "body",
    "main",
    "header",
    "section",
    "article",
    "nav",
    "form",
    "h1",
    "h2",
    "h3",
    "h4",
    "p",
    "dl",
    "dt",
    "dd",
    "ul",
    "ol",
    "li",
    "b",
    "small",
    "span",
    "div",
    "label",
    "input",
    "button",
    "select",
    "option",
    "progress",
    "details",
    "summary",
    "fieldset",
    "legend",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "caption",
    "svg",
    "g",
    "path",
    "line",
    "polyline",
    "circle",
    "rect",
    "text",
    "noscript",
    "mark",
    "template",
    "output",
    "colgroup",
    "col",
    "use",
    "defs",
    "pattern",
    "figure",
    "figcaption",
    "polygon",
    "tspan",
    "i",
}


class MarkupFinder(HTMLParser):
    """Collects elements and attributes of a page that can only come from data."""

    def __init__(self):
        super().__init__()
        self.found, self.scripts = [], 0

    def handle_starttag(self, tag, attrs):
        self.scripts += tag == "script"
        self.found += [tag] if tag not in ALLOWED else []
        self.found += [f"{tag} {name}" for name, _ in attrs if name.startswith("on") or name in ("src", "srcdoc")]


def find_markup(page: str) -> MarkupFinder:
    found = MarkupFinder()
    found.feed(page)
    return found


def test_escaped_text_cannot_add_markup():
    assert find_markup(f'<p title="{escaped(NASTY)}">{escaped(NASTY)}</p>').found == []
    written = script_json({NASTY: [NASTY]})
    assert not set("<>&") & set(written) and json.loads(written) == {NASTY: [NASTY]}


def test_a_page_for_judges_shows_markup_as_text(tmp_path):
    for name in ("wavelet", "gearbox"):
        item = {"id": NASTY, "text": f"{name} {NASTY}", "input": {NASTY: [NASTY, [NASTY]]}, "gold": NASTY}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(item) + "\n")
    made = make(tmp_path / "wavelet.jsonl", tmp_path / "gearbox.jsonl", tmp_path / "page.html", title=NASTY)
    page = find_markup(made.page.read_text(encoding="utf-8"))
    assert (page.found, page.scripts) == ([], 1)


def nasty(value):
    """Add markup to every string in the content."""
    if isinstance(value, str):
        return value + NASTY
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.name not in CHOICES]
        return dataclasses.replace(value, **{name: nasty(getattr(value, name)) for name in names})
    if isinstance(value, dict):
        return {nasty(key): nasty(item) for key, item in value.items()}
    return type(value)(map(nasty, value)) if isinstance(value, list | tuple) else value


def test_a_report_shows_markup_as_text():
    plain = sample_content(count=2, heads=3)
    expected = find_markup(render_page(plain))
    page = find_markup(render_page(nasty(plain)))
    assert expected.found == [] and page.found == []
    assert page.scripts == expected.scripts > 0


def test_a_table_of_samples_shows_markup_as_text():
    one = Sample(NASTY, [NASTY], {NASTY: [NASTY, 0], "b": [0, NASTY]})
    assert find_markup(samples_html([one])).found == []
