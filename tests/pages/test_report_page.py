"""The report page: it loads nothing from outside, runs nothing from data, and shows all values."""

import dataclasses
import html
import json
import re

import pytest
import torch

from repulsive.pages import Content, Example, Reading, render_page, write_report
from repulsive.pages.html.example_explorer import evidence_table
from repulsive.pages.html.head_maps import head_order, peak_summary
from repulsive.pages.html.heat_map import levels
from repulsive.pages.text import script_json
from tests.pages.browser import needs_browser, open_page
from tests.pages.sample import sample_content

RUNS = "document.title='broken into'"
HOSTILE = (
    f"<script>{RUNS}</script>",
    f"</script><script>{RUNS}</script>",
    f'"><img src=x onerror="{RUNS}">',
    f"' onmouseover='{RUNS}",
    f"<svg onload={RUNS}>",
    "<!--",
    "]]>",
    "a\u2028b",
    "\u202egnp.exe",
    "\u0000\ud800",
    "&lt;",
    "שלום",
)


def hostile_content() -> Content:
    """Hostile text in every text field."""
    bad = HOSTILE[1]
    content = sample_content(2)
    weights = torch.full((2, len(HOSTILE)), 1 / len(HOSTILE))
    example = Example(HOSTILE, bad, [Reading(bad, bad, 0.5, weights)], {bad: [0, 3], HOSTILE[3]: [5]})
    assert content.table is not None
    first = dataclasses.replace(content.table.rows[0], method=bad)
    metric = dataclasses.replace(content.table.metrics[0], name=bad, meaning=bad)
    table = dataclasses.replace(
        content.table,
        metrics=[metric, *content.table.metrics[1:]],
        rows=[first, *content.table.rows[1:]],
        baseline=bad,
        caption=bad,
        notes=[bad],
    )
    chart = content.charts[0]
    chart = dataclasses.replace(chart, name=bad, series=[dataclasses.replace(chart.series[0], method=HOSTILE[3])])
    return Content(f"Safe {bad}", bad, [(bad, HOSTILE[2])], table, [chart], [example, example])


def words_of(page: str, number: int) -> list[str]:
    """Words of the first card of an example on the page."""
    section = page.split(f'id="example-{number}"')[1]
    card = section.split('<p class="words">')[1].split("</p>")[0]
    return [html.unescape(word) for word in re.findall(r'<span class="w [^>]*>(.*?)</span>', card, re.S)]


def grid_cells(page: str) -> int:
    """Number of coloured cells in the map of the first method of the first example."""
    grid = page.split('data-method="0"')[1].split("</g>")[0]
    return len(re.findall(r"M\d+ \d+\.5h\.9", grid))


def one_example(weights: torch.Tensor | list[list[float]]) -> Content:
    tokens = [f"word{place}" for place in range(len(weights[0]))]
    return Content("T", examples=[Example(tokens, "a", [Reading("MA", "a", 1.0, weights)])])


def test_the_page_loads_nothing_from_outside():
    page = render_page(sample_content())
    assert re.findall(r"(?i)https?:|\bsrc=|url\(|@import|<link|<iframe|<base|style=|\son\w+=", page) == []
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None and policy[1].startswith("default-src 'none';") and "unsafe" not in policy[1]
    assert page.index("Content-Security-Policy") < page.index("<style>")


def test_the_table_has_formatted_numbers():
    page = render_page(sample_content())
    table = page.split('<table class="results"')[1].split("</table>")[0]
    assert "68.4 ± 0.8" in table and "0.802 ± 0.010" in table and "1.655 ± 0.020" in table
    assert "+2.8</small><small>[+1.7, +3.9]</small><small>p &lt; 0.001" in table
    assert "−0.051" in table


def test_every_word_of_every_example_is_on_the_page():
    content = sample_content()
    page = render_page(content)
    for number, example in enumerate(content.examples, 1):
        assert words_of(page, number) == list(example.tokens)


def test_the_first_example_is_open_without_a_script():
    page = render_page(sample_content(3))
    assert re.findall(r'id="example-(\d)"( open)?>', page) == [("1", " open"), ("2", ""), ("3", "")]
    assert 'id="controls" hidden' in page and "<noscript>" in page


def test_thirty_heads_and_many_examples_stay_small():
    assert len(render_page(sample_content(12, heads=30)).encode()) < 3_000_000


def test_examples_beyond_the_size_limit_are_left_out_with_a_warning():
    content = sample_content(6)
    whole = len(render_page(content).encode())
    page = render_page(content, max_bytes=whole * 2 // 3)
    warning = re.search(r"(\d) of 6 examples are left out", page)
    assert warning is not None and len(page.encode()) <= whole * 2 // 3
    assert page.count('<details class="example"') == page.count("<option") == 6 - int(warning[1])
    assert "6 of 6 examples are left out" in render_page(content, max_bytes=1)


def test_no_examples_no_charts_no_table():
    page = render_page(Content("Nothing yet"))
    assert "This report has no examples" in page and "<table" not in page and "<svg" not in page


@pytest.mark.parametrize(("heads", "words"), [(1, 1), (1, 40), (64, 200)])
def test_any_number_of_heads_and_words(heads, words):
    weights = torch.randn(heads, words, generator=torch.Generator().manual_seed(0)).mul(2).softmax(-1)
    page = render_page(one_example(weights))
    assert len(words_of(page, 1)) == words
    assert grid_cells(page) == int((levels(weights.double(), float(weights.max())) > 0).sum())
    assert ("one head: no pairs" in page) == (heads == 1)


def test_heads_without_attention():
    page = render_page(one_example([[0.0, 0.0, 0.0], [0.2, 0.0, 0.8]]))
    assert "2 heads, peaks on 1 word" in page and grid_cells(page) == 2
    silent = render_page(one_example([[0.0, 0.0], [0.0, 0.0]]))
    assert "2 heads, peaks on 0 different words" in silent and grid_cells(silent) == 0


def test_levels_at_their_boundaries():
    a = torch.tensor([0.0, 0.01, 0.012, 0.25, 0.89, 0.9, 1.0]).double()
    assert levels(a, 1.0).tolist() == [0, 0, 1, 4, 8, 9, 9]
    assert levels(a * 0.3, 0.3).tolist() == levels(a, 1.0).tolist()


def test_heads_are_ordered_by_their_peaks_and_silent_ones_last():
    weights = torch.tensor([[0.0, 0.0, 0.0], [0.1, 0.1, 0.8], [0.6, 0.4, 0.0], [0.2, 0.7, 0.1]])
    assert head_order(weights) == [2, 3, 1, 0]
    shuffle = torch.tensor([3, 1, 0, 2])
    assert shuffle[head_order(weights[shuffle])].tolist() == head_order(weights)
    assert peak_summary(Reading("MA", "a", 1.0, weights)) == "4 heads, peaks on 3 different words"


def test_coverage_is_shown_per_aspect():
    reading = Reading("MA", "a", 1.0, [[0.1, 0.2, 0.2, 0.5], [0.7, 0.1, 0.1, 0.1]])
    example = Example(["a", "b", "c", "d"], "a", [reading], {"food": [1, 2], "price": [1], "none": [], "place": [3]})
    shown = re.findall(r"<td>.*?([✓✗]).*?<small>(.*?)</small>", evidence_table(example, 0.4))
    assert shown == [("✓", "0.40, head 0"), ("✗", "0.20"), ("✓", "0.50, head 0")]


def test_json_is_safe_inside_a_script_element():
    value = ["</script><!--", "a&b", "\u2028", "]]>"]
    text = script_json(value)
    assert json.loads(text) == value and not set("<>&\u2028") & set(text)
    with pytest.raises(ValueError, match="JSON"):
        script_json([float("nan")])


def test_hostile_text_is_escaped():
    page = render_page(hostile_content())
    assert page.count("<script") == 2 and page.count("</script") == 2 and "<img" not in page and "<!--" not in page
    assert words_of(page, 1)[7:10] == ["a⟨U+2028⟩b", "⟨U+202E⟩gnp.exe", "⟨U+0000⟩⟨U+D800⟩"]


def test_the_file_is_written_aside_and_renamed(tmp_path):
    path = write_report(tmp_path / "deep" / "report.html", sample_content(1))
    assert path.read_text(encoding="utf-8") == render_page(sample_content(1))
    write_report(path, Content("Second"))
    assert [file.name for file in path.parent.iterdir()] == ["report.html"] and "Second" in path.read_text()
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        write_report(tmp_path / "taken", sample_content(1))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["deep", "taken"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": ["a"]}, "does not fit 1 tokens"),
        ({"tokens": []}, "at least one token"),
        ({"evidence": {"food": [2]}}, "outside the 2 tokens"),
        ({"readings": [Reading("MA", "a", 1.0, [[0.5, float("nan")]])]}, "infinite or NaN"),
    ],
)
def test_examples_that_cannot_be_drawn_are_rejected(change, message):
    given = {"tokens": ["a", "b"], "label": "a", "readings": [Reading("MA", "a", 1.0, [[0.5, 0.5]])]}
    with pytest.raises(ValueError, match=message):
        Example(**{**given, **change})


def test_examples_with_different_methods_are_rejected():
    one, two = (Example(["a"], "a", [Reading(name, "a", 1.0, [[1.0]])]) for name in ("MA", "SVGD"))
    with pytest.raises(ValueError, match="differ in their methods"):
        Content("T", examples=[one, two])


# In a real browser


@needs_browser
def test_hostile_text_is_shown_and_never_run(tmp_path):
    path = write_report(tmp_path / "hostile.html", hostile_content())
    seen = open_page(path, "example=2&view=heads")
    title = re.search(r"<title>(.*?)</title>", seen.dom, re.S)
    assert title is not None and html.unescape(title[1]) == f"Safe {HOSTILE[1]}"
    assert seen.console == []
    assert words_of(seen.dom, 2) == words_of(path.read_text(encoding="utf-8"), 2)
    assert 'data-view="heads"' in seen.dom and "<img" not in seen.dom


@needs_browser
def test_the_policy_stops_what_escaping_would_miss(tmp_path):
    path = write_report(tmp_path / "open.html", sample_content(1))
    planted = f'<script>{RUNS}</script><img src="x" onerror="{RUNS}"><p style="color:red">'
    path.write_text(path.read_text(encoding="utf-8").replace("<main>", f"<main>{planted}"), encoding="utf-8")
    seen = open_page(path)
    assert "<title>Heads that do not collapse</title>" in seen.dom
    assert len([line for line in seen.console if "Content Security Policy" in line]) >= 3


@needs_browser
def test_the_url_selects_example_view_and_head(tmp_path):
    content = sample_content(3)
    path = write_report(tmp_path / "report.html", content)
    seen = open_page(path, "example=2&view=head&head=3")
    assert seen.console == []
    assert re.findall(r'id="example-(\d)" open', seen.dom) == ["2"]
    weights = content.examples[1].readings[0].weights()
    word = content.examples[1].tokens[int(weights[3].argmax())]
    section = seen.dom.split('id="example-2"')[1].split("</details>")[0]
    assert f"head 3, peak on “{word}” ({float(weights[3].max()):.3f})" in section
    card = section.split('<p class="words">')[1].split("</p>")[0]
    top = max(float(reading.weights().max()) for reading in content.examples[1].readings)
    thousandths = (weights[3] * 1000).round() / 1000  # the precision of the page
    assert [int(step) for step in re.findall(r'class="w h(\d)', card)] == levels(thousandths, top).tolist()


DRIVER = """
const seen = [], note = () => seen.push(location.hash);
const click = (selector) => { document.querySelector(selector).click(); note(); };
click("#next"); click("input[value=heads]");
const cell = document.querySelector("#example-2 .cells[data-method='1'] .touch"), box = cell.getBoundingClientRect();
const at = { bubbles: true, clientX: box.left + box.width - 2, clientY: box.top + 2 };
cell.dispatchEvent(new PointerEvent("pointermove", at));
seen.push(document.getElementById("readout").textContent);
cell.dispatchEvent(new MouseEvent("click", at)); note();
const slider = document.getElementById("head"); slider.value = "2"; slider.dispatchEvent(new Event("input")); note();
click("input[value=overall]"); click("#previous");
document.title = JSON.stringify(seen);
"""


@needs_browser
def test_buttons_slider_and_cells_select_too(tmp_path):
    content = sample_content(2)
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", render_page(content))
    path = tmp_path / "driven.html"
    path.write_text(page.replace("</body>", f"<script>{DRIVER}</script></body>"), encoding="utf-8")
    seen = open_page(path)
    assert seen.console == []
    title = re.search(r"<title>(.*?)</title>", seen.dom)
    assert title is not None
    weights = content.examples[1].readings[1].weights()
    head, last = head_order(weights)[0], content.examples[1].tokens[-1]
    assert json.loads(html.unescape(title[1])) == [
        "#example=2&view=overall",
        "#example=2&view=heads",
        f"MA + R · head {head} · “{last}” · {float(weights[head, -1]):.3f}",
        f"#example=2&view=head&head={head}",
        "#example=2&view=head&head=2",
        "#example=2&view=overall",
        "#example=1&view=overall",
    ]


@needs_browser
def test_a_page_without_examples_runs_without_errors(tmp_path):
    seen = open_page(write_report(tmp_path / "empty.html", Content("Nothing yet")))
    assert seen.console == [] and "<title>Nothing yet</title>" in seen.dom
