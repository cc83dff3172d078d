"""Attention over pictures: bytes, size limits, and behaviour in a real browser."""

import base64
import json
import re

import pytest
import torch

from repulsive.diagnostics.inspection import Inspection
from repulsive.diagnostics.patches import PatchLayout
from repulsive.diagnostics.rollout import attention_rollout
from repulsive.pages.data.pictures import Pictures, from_bytes, log_bytes, picture_maps, query_rows
from repulsive.pages.html.document import write_whole
from repulsive.pages.html.picture_map import picture_section
from repulsive.pages.inspection_page import render_inspection
from tests.pages.browser import driven_browser, driven_page, needs_driver, violations

LAYOUT = PatchLayout(3, 4, ("class", "register 0"), (8, 8))
# A JPEG of 8 x 8 grey pixels, so that these tests do not need Pillow.
JPEG = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAgGBgcGBQgHBwcJCQgKDBQNDAsLDBkSEw8UHRofHh0aHBwgJC4nICIsIxwcKDcpLDAxNDQ0Hyc5"
    "PTgyPC4zNDL/wAALCAAIAAgBAREA/8QAHwAAAQUBAQEBAQEAAAAAAAAAAAECAwQFBgcICQoL/8QAtRAAAgEDAwIEAwUFBAQAAAF9AQIDAAQR"
    "BRIhMUEGE1FhByJxFDKBkaEII0KxwRVS0fAkM2JyggkKFhcYGRolJicoKSo0NTY3ODk6Q0RFRkdISUpTVFVWV1hZWmNkZWZnaGlqc3R1dnd4"
    "eXqDhIWGh4iJipKTlJWWl5iZmqKjpKWmp6ipqrKztLW2t7i5usLDxMXGx8jJytLT1NXW19jZ2uHi4+Tl5ufo6erx8vP09fb3+Pn6/9oACAEB"
    "AAA/ACv/2Q=="
)
EVIL = "</script><img src=x onerror=alert(1)>"


def attention(heads=2, tokens=14, seed=0):
    return (1.5 * torch.randn(heads, tokens, tokens, generator=torch.Generator().manual_seed(seed))).softmax(-1)


def made(pictures=2, layers=2, layout=LAYOUT, heads=2):
    names = [f"layer {row}" for row in range(layers)]
    maps = tuple(
        {name: attention(heads, layout.tokens, 10 * item + row) for row, name in enumerate(names)}
        for item in range(pictures)
    )
    rows = [(name, row, "encoder", heads) for row, name in enumerate(names)]
    importance = torch.full((layers, heads), heads**-0.5).double()
    return Inspection([], rows, {}, importance=importance, items=pictures, maps=maps)


def data_of(page):
    return json.loads(re.search(r'id="picture-data">(.*?)</script>', page, re.S)[1])


def test_bytes_keep_weights_within_four_percent():
    weights = torch.cat([attention(4, 50), torch.eye(50)[None]])
    stored = log_bytes(weights)
    decoded = from_bytes(stored)
    kept = weights.double() * 50 > 2**-7.9
    assert kept.double().mean() > 0.5 and (decoded[kept] / weights.double()[kept] - 1).abs().max() < 0.04
    assert decoded[~kept].max() < 2**-7.8 / 50
    assert torch.allclose(decoded[-1], torch.eye(50).double(), atol=1e-12)


def test_queries_are_the_mean_special_tokens_and_blocks():
    weights = torch.rand(3, 14, 14, dtype=torch.float64)
    rows = query_rows(weights, LAYOUT, 2)
    assert rows.shape == (3, 1 + 2 + 2 * 2, 14)
    assert torch.allclose(rows[:, 0], weights[:, 2:].mean(1)) and torch.equal(rows[:, 1:3], weights[:, :2])
    corner = weights[:, 2:].unflatten(1, (3, 4))[:, 2:, 2:]  # the last block has one row only
    assert torch.allclose(rows[:, -1], corner.mean((1, 2)))
    assert torch.equal(query_rows(weights, LAYOUT, 1)[:, 3:], weights[:, 2:])
    assert query_rows(weights, LAYOUT, 0).shape[1] == 3


def test_data_of_the_page_are_the_maps_of_the_model():
    inspection = made()
    page = render_inspection(inspection, title="x", pictures=Pictures(LAYOUT, ["a", EVIL], [JPEG] * 2))
    data = data_of(page)
    assert data["block"] == 1 and data["special"] == ["class", "register 0"] and "<img" not in page
    stored = torch.tensor(list(base64.b64decode(data["images"][1]["sides"][0]["layers"][1]))).view(2, 3 + 12, 14)
    assert stored.tolist() == log_bytes(query_rows(inspection.maps[1]["layer 1"], LAYOUT, 1)).tolist()
    rolled = torch.tensor(list(base64.b64decode(data["images"][0]["sides"][0]["rollout"]))).view(15, 14)
    expected = attention_rollout(list(inspection.maps[0].values()))
    assert torch.allclose(from_bytes(rolled)[3:], expected[2:], rtol=0.04, atol=1e-4)
    assert "img-src data:" in page and 'id="layers"' not in page


def test_layers_of_other_shapes_have_no_map():
    inspection = made(1)
    inspection.maps[0]["layer 0"] = torch.ones(2, 4, 4) / 4
    (shown,) = picture_maps(inspection, Pictures(LAYOUT, ["a"], [JPEG]))
    assert shown.layers[0] is None and shown.layers[1].shape == (2, 14, 14)
    assert torch.equal(shown.rollout, attention_rollout([inspection.maps[0]["layer 1"]]))


def test_queries_and_pictures_shrink_to_fit():
    layout = PatchLayout(12, 12, ("class",))
    maps = picture_maps(made(3, 4, layout), Pictures(layout, ["a", "b", "c"], [JPEG] * 3))
    whole, coarse, few = (picture_section(maps, layout, room) for room in (2_000_000, 170_000, 12_000))
    assert data_of(whole)["block"] == 1 and "left out" not in whole
    assert data_of(coarse)["block"] == 3 and "means over 3 x 3 patches" in coarse and len(coarse) < 170_000
    assert len(data_of(few)["images"]) == 1 and "2 of 3 pictures are left out" in few and len(few) < 12_000


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    pictures = Pictures(LAYOUT, ["first.png", EVIL], [JPEG] * 2)
    return write_whole(folder / "page.html", render_inspection(made(), title="Heads", pictures=pictures))


@pytest.fixture(scope="module")
def browser():
    with driven_browser() as started:
        yield started


def near(text):
    return pytest.approx(float(text.rsplit(" ", 1)[1]), rel=0.06, abs=1e-3)


@needs_driver
def test_a_click_chooses_the_query_of_the_picture_the_atlas_and_the_drawer(browser, path):
    maps = made().maps
    with driven_page(browser, path) as (page, messages):
        assert page.is_checked("input[name=query][value='1']")
        tile = "() => document.querySelector('.tiles').toDataURL()"
        before = page.evaluate(tile)
        page.click(".head[data-layer='1'][data-head='1']")
        page.wait_for_selector("#drawer .picture")
        page.hover("#drawer .picture", position={"x": 3, "y": 3})
        shown = page.inner_text("#drawer .drawer-readout")
        assert shown.startswith("class token → patch in row 0, column 0") and float(
            maps[0]["layer 1"][1, 0, 2]
        ) == near(shown)
        box = page.locator("#drawer .picture").bounding_box()
        page.mouse.click(box["x"] + 0.6 * box["width"], box["y"] + 0.5 * box["height"])  # row 1, column 2: token 2 + 6
        assert "row 1, column 2" in page.inner_text("#pictures .drawer-readout")
        page.mouse.move(box["x"] + box["width"] - 3, box["y"] + 3)
        shown = page.inner_text("#drawer .drawer-readout")
        assert float(maps[0]["layer 1"][1, 8, 5]) == near(shown)
        assert page.evaluate(tile) != before and page.locator("input[name=query]:checked").count() == 0
        page.focus("#drawer .picture")
        page.keyboard.press("ArrowDown")
        assert "row 2, column 2" in page.inner_text("#pictures .drawer-readout")
        assert page.inner_text("#drawer-title") == "layer 1 · head 1"  # arrow keys did not change the head
        page.keyboard.press("Escape")
        page.select_option("#picture-pick", "1")
        page.check("input[name=query][value='2']", force=True)
        page.hover("#pictures .picture", position={"x": 3, "y": 3})
        rolled = attention_rollout(list(maps[1].values()))
        assert float(rolled[1, 2]) == near(page.inner_text("#pictures .drawer-readout"))
        assert messages == []


@needs_driver
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_the_screen_and_is_accessible(browser, path, width):
    with driven_page(browser, path, width=width) as (page, messages):
        for fragment in ("", "L1H1"):
            page.evaluate(f"location.hash = '{fragment}'")
            wide = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
            assert wide[0] <= wide[1]
        assert messages == []
    assert violations(browser, path, "L0H1" if width == 390 else "", dark=width == 390, width=width) == []
