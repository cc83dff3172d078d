"""The page that compares two models: data, size limit, and behaviour in a real browser."""

import json
import re
from dataclasses import replace

import pytest

from repulsive.diagnostics.comparison_summary import comparison_verdict
from repulsive.diagnostics.inspection import Inspection
from repulsive.diagnostics.model_comparison import Difference, ModelComparison
from repulsive.pages.comparison_page import encode_comparison, render_comparison
from repulsive.pages.data.pictures import Pictures
from repulsive.pages.inspection_page import write_page_and_numbers
from tests.pages import test_picture_map as on_pictures
from tests.pages.browser import driven_browser, driven_page, needs_driver, violations
from tests.pages.test_atlas import EVIL, WORDS, causal, data_of, made

DIFFERENCE = Difference((0.4, 0.5, 0.45, 0.5), (0.3, 0.38, 0.36, 0.41))


def compared():
    """Two made inspections; head 1 of layer 0 is removed, so that head 2 becomes head 1 and so on."""
    before, after = made(), made()
    maps = tuple(
        {name: causal(len(x) - (name == "layer 0"), 5, 100 * item + row) for row, (name, x) in enumerate(each.items())}
        for item, each in enumerate(after.maps)
    )
    layers = [(name, row, where, heads - (row == 0)) for name, row, where, heads in after.layers]
    logits = list(after.circuits.logits)
    kept = logits[0].similarity.cosine[[0, 2, 3]][:, [0, 2, 3]]
    logits[0] = replace(logits[0], similarity=replace(logits[0].similarity, cosine=kept))
    after = replace(after, layers=layers, maps=maps, circuits=replace(after.circuits, logits=logits))
    columns = [[(0, 0), (1, None), (2, 1), (3, 2)], *([(h, h) for h in range(n)] for n in (3, 4))]
    return ModelComparison(before, after, columns, DIFFERENCE)


def test_the_page_has_the_verdict_both_sides_and_the_tables():
    comparison = compared()
    page = render_comparison(comparison, title=EVIL, facts=[("After", EVIL)], tokens=[WORDS] * 2)
    assert (
        comparison_verdict(comparison) in page and "heads attend less alike than before" in page and "<img" not in page
    )
    data = data_of(page)
    assert [layer["heads"] for layer in data["layers"]] == [4, 3, 4]
    assert [layer["heads"] for layer in data["after"]] == [3, 3, 4] and data["columns"][0][1:3] == [[1, None], [2, 1]]
    assert "→ removed" in page and "<td>4 → 3</td>" in page
    assert "effective heads" not in page.lower()  # they have no value for untrained models
    explorer = json.loads(re.search(r'id="attention">(.*?)</script>', page, re.S)[1])
    assert explorer["methods"] == ["before", "after"] and explorer["examples"][0]["maps"][1][0]["heads"] == 3


def test_the_file_stays_small_and_weights_alone_need_no_script():
    page = render_comparison(compared(), title="x", max_bytes=75_000)
    assert len(page.encode()) <= 75_000
    bare = Inspection([], [], {})
    page = render_comparison(ModelComparison(bare, bare, []), title="x")
    assert "<script" not in page and "Only weights were compared" in page


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    comparison = compared()
    page = render_comparison(comparison, title="Heads of a and b", tokens=[WORDS] * 2)
    return write_page_and_numbers(folder, page, encode_comparison(comparison))


@pytest.fixture(scope="module")
def browser():
    with driven_browser() as started:
        yield started


@needs_driver
def test_the_slider_fades_between_the_models(browser, path):
    opacity = "(which) => Number(getComputedStyle(document.querySelector(which)).opacity)"
    with driven_page(browser, path) as (page, messages):
        assert page.locator(".tiles").count() == 6 and page.locator(".head.removed").count() == 1
        assert page.evaluate(opacity, ".tiles.side1") == 0
        page.evaluate(
            "() => { const f = document.getElementById('fade'); f.value = 25; f.dispatchEvent(new Event('input')); }"
        )
        assert page.evaluate(opacity, ".tiles.side1") == 0.25
        page.click("#fade-after")
        assert page.evaluate(opacity, ".tiles.side1") == 1 and page.input_value("#fade") == "100"
        hatch = "getComputedStyle(document.querySelector('.head.removed'), '::before').opacity"
        assert page.evaluate(hatch) == "1"
        page.click("#fade-before")
        assert page.evaluate(hatch) == "0" and messages == []


@needs_driver
def test_the_drawer_shows_both_models(browser, path):
    comparison = compared()
    with driven_page(browser, path) as (page, messages):
        page.evaluate("location.hash = 'L0H2'")  # head 2 before, head 1 after
        page.wait_for_selector("#drawer svg")
        text = page.inner_text("#drawer-body")
        before, after = (
            float(side.importance[0, head]) for side, head in ((comparison.before, 2), (comparison.after, 1))
        )
        assert "2 → 1" in text and f"{before:.3f}" in text and f"{after:.3f}" in text
        assert page.locator("#drawer .touch").count() == 2
        values = dict(
            zip(
                page.locator(".bar span:first-child").all_inner_texts(),
                page.locator(".bar .value").all_inner_texts(),
                strict=True,
            )
        )
        assert values["head 1"].endswith("→ none") and set(values) == {"head 0", "head 1", "head 3"}
        page.locator("#drawer .touch").nth(1).scroll_into_view_if_needed()
        box = page.locator("#drawer .touch").nth(1).bounding_box()
        page.mouse.move(box["x"] + 3, box["y"] + box["height"] - 3)
        shown = page.locator(".drawer-readout").nth(1).inner_text().rsplit(" · ", 1)[1]
        assert float(shown) == pytest.approx(float(comparison.after.maps[0]["layer 0"][1, 4, 0]), abs=7e-4)
        page.evaluate("location.hash = 'L0H1'")
        page.wait_for_function("document.getElementById('drawer-title').textContent === 'layer 0 · head 1'")
        assert "this head is removed" in page.inner_text("#drawer-body") and page.locator("#drawer .touch").count() == 1
        assert messages == []


@needs_driver
def test_pictures_of_both_models(browser, tmp_path):
    before = on_pictures.made()
    maps = tuple({name: x.flip(0) for name, x in each.items()} for each in before.maps)
    after = replace(before, maps=maps)
    comparison = ModelComparison(before, after, [[(0, 0), (1, 1)]] * 2, DIFFERENCE)
    pictures = Pictures(on_pictures.LAYOUT, ["a", "b"], [on_pictures.JPEG] * 2)
    page = render_comparison(comparison, title="Heads", pictures=pictures)
    page_of = write_page_and_numbers(tmp_path, page, encode_comparison(comparison))
    with driven_page(browser, page_of) as (page, messages):
        assert page.locator("#pictures .picture").count() == 2
        page.click(".head[data-layer='1'][data-head='1']")
        page.wait_for_selector("#drawer .picture")
        assert page.locator("#drawer .picture").count() == 2
        page.locator("#drawer .picture").nth(1).hover(position={"x": 3, "y": 3})
        shown = page.locator("#drawer .drawer-readout").nth(1).inner_text()
        assert float(after.maps[0]["layer 1"][1, 0, 2]) == on_pictures.near(shown)
        assert messages == []


@needs_driver
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_the_screen_and_is_accessible(browser, path, width):
    with driven_page(browser, path, width=width) as (page, messages):
        for fragment in ("", "L0H2"):
            page.evaluate(f"location.hash = '{fragment}'")
            wide = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
            assert wide[0] <= wide[1]
        assert messages == []
    assert violations(browser, path, "L0H2" if width == 390 else "", dark=width == 390, width=width) == []


def test_a_second_model_without_maps():
    comparison = compared()
    empty = replace(comparison, after=replace(comparison.after, maps=()))
    page = render_comparison(empty, title="x")
    assert "maps" not in data_of(page)["after"][0]
    assert "maps" in data_of(page)["layers"][0]
