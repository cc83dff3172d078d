"""Table of generated texts: copied entities are marked, all other text is unchanged and escaped."""

from html.parser import HTMLParser

import pytest

from repulsive.errors import DataError
from repulsive.pages.sample_table import Sample, samples_html, samples_markdown

GOLD = ["we", "use", 1, "for", 0, "."]
SAMPLE = Sample(
    "A <b>title</b> | two", ["parsing", "beam search"], {"Gold": GOLD, "+ RMA": "we parse with Beam Search ."}
)


class Cells(HTMLParser):
    """Parse the text of each cell and of each `<mark>`."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.cells, self.marked = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")
        if tag == "mark":
            self.marked.append("")

    def handle_endtag(self, tag):
        self.tags.append(f"/{tag}")

    def handle_data(self, data):
        if self.cells and self.tags[-1] not in ("/td", "/th", "/tr"):
            self.cells[-1] += data
        if self.tags[-1] == "mark":
            self.marked[-1] += data


def test_markdown():
    assert samples_markdown([SAMPLE]).splitlines() == [
        r"| Title | Gold | \+ RMA |",
        "| --- | --- | --- |",
        r"| A \<b\>title\</b\> \| two | we use **beam search** for **parsing** . | we parse with **beam search** . |",
    ]
    plain = Sample("", ["a*b"], {"Gold": [0, "x\ny", "$z$"]})
    assert samples_markdown([plain]).splitlines()[-1] == r"| **a\*b** x y \$z\$ |"


def test_html():
    page = samples_html([SAMPLE, SAMPLE])
    parsed = Cells(page)
    row = ["A <b>title</b> | two", "we use beam search for parsing .", "we parse with beam search ."]
    assert [cell.strip() for cell in parsed.cells] == ["Gold", "+ RMA", *row, *row]
    assert parsed.marked == ["beam search", "parsing", "beam search"] * 2 and "b" not in parsed.tags
    for tag in ("table", "thead", "tbody", "tr", "td", "th", "mark"):
        assert parsed.tags.count(tag) == parsed.tags.count(f"/{tag}") > 0
    nasty = Sample("", ['<script>"'], {"<i>": ["</td>", 0, "&", "\u202e"]})
    page = samples_html([nasty])
    assert "<script" not in page and "<i>" not in page and page.count("</td>") == 1 and "⟨U+202E⟩" in page
    assert "<mark>&lt;script&gt;&quot;</mark>" in page and "colgroup" not in page


def test_entities_in_plain_text_are_matched_longest_first():
    sample = Sample("", ["search", "beam search", ""], {"Gold": "Beam search is search , researched"})
    assert Cells(samples_html([sample])).marked == ["beam search", "search"]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "at least one sample"),
        ([Sample("", [], {})], "at least one sample with texts, got none"),
        (
            [SAMPLE, Sample("", [], {"Gold": "a"})],
            r"sample 1 has texts of \['Gold'\], the first sample of \['Gold', '\+ RMA'\]",
        ),
        ([Sample("", ["a"], {"Gold": [1]})], "Gold: copies entity 1, but there are 1, numbered from 0"),
        ([Sample("", ["a"], {"Gold": [-1]})], "Gold: copies entity -1, but there are 1"),
    ],
)
def test_mistakes(samples, message):
    for show in (samples_markdown, samples_html):
        with pytest.raises(DataError, match=message):
            show(samples)
