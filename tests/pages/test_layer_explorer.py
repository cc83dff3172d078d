"""Attention explorer of models with layers: packed data, size limit, and drawing in a real browser."""

import json
import re

import pytest
import torch

from repulsive.pages import Content, Layered, Maps, render_page, write_report
from repulsive.pages.data.layers import ALL_TOKENS, layer_names
from repulsive.pages.html.layer_explorer import ALPHABET, STEPS, layer_explorer, packed, script_data
from tests.pages.browser import driven_browser, driven_page, needs_driver, violations

RUNS = "document.title='broken into'"
EVIL = f"<img src=x onerror={RUNS}>"
SOURCE, TARGET = ["▁ein", EVIL, "‮turned", "</script>"], ["<s>", "▁a", "man"]


def maps(layer, rows, columns, heads, seed):
    make = torch.Generator().manual_seed(seed)
    size = {"source": len(SOURCE), "target": len(TARGET)}
    weights = (3 * torch.randn(heads, size[rows], size[columns], generator=make)).softmax(-1)
    return Maps(layer, weights, rows, columns)


def example(seed=0):
    own = [maps("encoder layer 0", "source", "source", 3, seed), maps("cross layer 0", "target", "source", 3, seed + 1)]
    other = [maps("encoder layer 0", "source", "source", 2, seed + 2)]
    return Layered({"source": SOURCE, "target": TARGET}, {"MA": own, f"{EVIL} & co": other})


def content(count=3):
    return Content("Layers", layered=[example(10 * i) for i in range(count)])


def unpacked(text):
    codes = {letter: place for place, letter in enumerate(ALPHABET.decode())}
    return [(64 * codes[a] + codes[b]) / STEPS for a, b in zip(text[::2], text[1::2], strict=True)]


def test_packed_weights_can_be_decoded():
    weights = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(0))
    assert unpacked(packed(weights)) == pytest.approx(weights.flatten().tolist(), abs=0.5 / STEPS + 1e-9)
    given = example()
    data = script_data(given, layer_names([given]), list(given.readings))
    assert data["maps"][1][1] is None and data["maps"][0][1]["rows"] == "target"
    assert data["texts"]["source"][2] == "⟨U+202E⟩turned"
    cells = unpacked(data["maps"][0][0]["weights"])
    assert cells[4 * 4 + 2] == pytest.approx(float(given.readings["MA"][0].weights[1, 0, 2]), abs=2e-4)


def test_weights_of_a_wrong_shape_are_rejected():
    texts = {"source": SOURCE, "target": TARGET}
    for wrong in (torch.rand(2, 4, 3), torch.rand(4, 4), torch.rand(0, 4, 4), -torch.rand(2, 4, 4)):
        with pytest.raises(ValueError, match="layer 0"):
            Layered(texts, {"MA": [Maps("layer 0", wrong, "source", "source")]})
    with pytest.raises(ValueError, match="at least one"):
        Layered(texts, {})


def test_received_attention_is_the_mean_over_query_tokens():
    given = example()
    small = given.received()
    assert small.readings["MA"][1].rows == ALL_TOKENS and small.readings["MA"][1].columns == "source"
    torch.testing.assert_close(small.readings["MA"][1].weights[:, 0], given.readings["MA"][1].weights.mean(1))


def test_a_page_stays_below_its_size_limit():
    words = [str(i) for i in range(60)]
    large = [
        Layered({"text": words}, {"MA": [Maps("layer 0", torch.rand(12, 60, 60), "text", "text")]}) for _ in range(3)
    ]
    whole = layer_explorer(large, ["MA"], 10**6)
    assert "to keep this file small" not in whole and len(whole) > 3 * 2 * 12 * 3600
    one = layer_explorer(large, ["MA"], 100_000)
    assert "2 of 3 examples show the mean over query tokens" in one and len(one.encode()) < 110_000
    none = layer_explorer(large, ["MA"], 2_000)
    assert "3 of 3 examples are left out" in none and "<script" not in none
    page = render_page(Content("Layers", layered=large), max_bytes=200_000)
    assert len(page.encode()) <= 200_000


def test_a_page_has_one_explorer():
    from tests.pages.sample import sample_examples

    with pytest.raises(ValueError, match="not both"):
        Content("Two", examples=sample_examples(1), layered=[example()])


def test_data_never_becomes_markup():
    page = render_page(content())
    assert "<img" not in page and page.count("</script>") == 2 and page.count("<script") == 2
    data = json.loads(re.search(r'id="attention">(.*?)</script>', page, re.S)[1])
    assert data["examples"][0]["texts"]["source"][1] == EVIL and data["methods"][1] == f"{EVIL} & co"


def point_at_first_cell(page):
    cells = page.locator("#stage .touch").first
    cells.scroll_into_view_if_needed()
    box = cells.bounding_box()
    page.mouse.move(box["x"] + 3, box["y"] + 3)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_report(tmp_path_factory.mktemp("layered") / "page.html", content())


@pytest.fixture(scope="module")
def browser():
    with driven_browser() as started:
        yield started


@needs_driver
def test_example_layer_heads_and_two_methods_can_be_selected(browser, path):
    with driven_page(browser, path) as (page, messages):
        assert page.locator("#stage .column").count() == 2 and page.locator("#stage .alone").count() == 5
        page.click("#next")
        page.focus("#layer")
        page.keyboard.press("ArrowDown")
        assert page.evaluate("location.hash").startswith("#example=2&layer=2")
        assert "has no cross layer 0" in page.inner_text(".column:nth-child(2)")
        assert "target attends to source" in page.inner_text(".column:nth-child(1)")
        page.focus("input[name=heads][value='0']")
        page.keyboard.press("Space")
        page.keyboard.press("Tab")
        page.keyboard.press("Space")
        assert page.evaluate("location.hash") == "#example=2&layer=2&heads=2&left=1&right=2"
        point_at_first_cell(page)
        wanted = example(10).readings["MA"][1].weights[2, 0, 0]
        label, number = page.inner_text("#readout").rsplit(" · ", 1)
        assert label == "MA · cross layer 0 · head 2 · “<s>” attends to “▁ein”"
        assert float(number) == pytest.approx(float(wanted), abs=7e-4)
        page.select_option("#right", "1")
        assert page.locator("#stage .column").count() == 1
        page.click("#every")
        assert page.locator("input[name=heads]:checked").count() == 3
        assert messages == [] and page.title() == "Layers"


@needs_driver
def test_small_maps_are_buttons_that_show_their_head_alone(browser, tmp_path):
    words = [f"word{i}" for i in range(30)]
    weights = torch.rand(12, 30, 30, generator=torch.Generator().manual_seed(0)) / 30
    given = Layered({"text": words}, {"model": [Maps("layer 0", weights, "text", "text")]})
    path = write_report(tmp_path / "page.html", Content("Small", layered=[given]))
    with driven_page(browser, path) as (page, messages):
        assert page.locator(".thumb").count() == 12 and page.locator("#left").count() == 0
        page.focus(".thumb:nth-child(5)")
        page.keyboard.press("Enter")
        assert page.evaluate("location.hash") == "#example=1&layer=1&heads=4" and page.locator(".alone").count() == 1
        page.check("input[value=mean]", force=True)
        assert "mean over heads" in page.inner_text("#stage")
        point_at_first_cell(page)
        assert float(page.inner_text("#readout").split()[-1]) == pytest.approx(float(weights[:, 0, 0].mean()), abs=7e-4)
        assert messages == []


@needs_driver
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_fits_the_screen_and_is_accessible(browser, path, dark, width):
    with driven_page(browser, path, dark=dark, width=width) as (page, messages):
        for chosen in ("", "layer=2&heads=mean,1"):
            page.evaluate(f"location.hash = '{chosen}'")
            wide = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
            assert wide[0] <= wide[1]
        assert messages == []
    assert violations(browser, path, "layer=1&heads=1", dark=dark, width=width) == []
