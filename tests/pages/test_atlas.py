"""Head atlas: data, markup, size limit, and behaviour in a real browser."""

import base64
import json
import re

import pytest
import torch

from repulsive.diagnostics.circuits import Similarity
from repulsive.diagnostics.head_kinds import HeadKinds
from repulsive.diagnostics.inspection import Inspection
from repulsive.diagnostics.output_change import METRICS
from repulsive.diagnostics.redundancy import Ablation
from repulsive.diagnostics.similarity import Diversity
from repulsive.diagnostics.untrained_baseline import AgainstChance, Compared, Null
from repulsive.diagnostics.verdict import verdict
from repulsive.pages import Grid
from repulsive.pages.data.atlas import UNIFORM, against_uniform, atlas_layers, pictures
from repulsive.pages.html.atlas import head_atlas
from repulsive.pages.html.document import write_whole
from repulsive.pages.html.heat_map import overlap_grid, signed_levels
from repulsive.pages.html.panel import grid_rows
from repulsive.pages.inspection_page import render_inspection
from tests.pages.browser import driven_browser, driven_page, needs_driver, violations

EVIL = "<img src=x onerror=alert(1)>"
WORDS = ["<s>", "the", EVIL, "</script>", "end"]


def causal(heads, length, seed=0):
    """Random attention [M, T, T] in which a query sees itself and earlier keys."""
    logits = 2 * torch.randn(heads, length, length, generator=torch.Generator().manual_seed(seed))
    return logits.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(-1)


def made(layers=3, heads=4, length=5, examples=2):
    """An inspection without a model; layer 1 has one head less, head 1 of layer 2 is redundant."""
    names = [f"layer {row}" for row in range(layers)]
    counts = [heads - (row == 1) for row in range(layers)]
    make = torch.Generator().manual_seed(1)
    similar = []
    for name, count in zip(names, counts, strict=True):
        unit = torch.nn.functional.normalize(torch.randn(count, 3, generator=make, dtype=torch.float64), dim=-1)
        similar.append(Compared(Similarity(name, "logits", unit @ unit.T, 9), Null((0.0, 0.01)), Null((0.0, 0.01))))
    change = torch.rand(layers, heads, generator=make).double() + 0.1
    importance = torch.rand(layers, heads, generator=make).double() + 0.1
    change[1, -1] = importance[1, -1] = torch.nan
    change[2, 1] = 0.0
    scores = {kind: torch.zeros(layers, heads).double() for kind in ("induction", "previous token")}
    scores["induction"][0, 2] = 0.8
    maps = tuple(
        {
            name: causal(count, length, 10 * item + row)
            for row, (name, count) in enumerate(zip(names, counts, strict=True))
        }
        for item in range(examples)
    )
    weights = [Diversity(each.similarity.name, "outputs", torch.ones(1, 1), each.similarity.cosine) for each in similar]
    return Inspection(
        [],
        [(name, row, "decoder", count) for row, (name, count) in enumerate(zip(names, counts, strict=True))],
        {"outputs": weights},
        importance=importance,
        ablation=Ablation(tuple(names), 0.0, change),
        metric=METRICS["states"],
        items=examples,
        maps=maps,
        circuits=AgainstChance(similar),
        kinds=HeadKinds(scores, dict.fromkeys(scores, 0.3)),
    )


def data_of(page):
    return json.loads(re.search(r'id="atlas-data">(.*?)</script>', page, re.S)[1])


def test_uniform_attention_is_flat_with_and_without_a_causal_mask():
    full = torch.full((1, 4, 4), 0.25)
    lower = torch.ones(4, 4).tril() / torch.arange(1, 5)[:, None]
    assert (pictures(full, 8) == UNIFORM).all()
    drawn = pictures(lower[None], 8)[0]
    assert (drawn[torch.ones(4, 4).tril().bool()] == UNIFORM).all()
    assert (drawn[torch.ones(4, 4).triu(1).bool()] == 0).all()  # not visible


def test_pictures_are_logarithmic_and_clamped():
    weights = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).expand(4, 4)[None]  # times 4: 2, 1, 1/2, 1/2
    row = pictures(weights, 4)[0, 0].tolist()
    assert row == [160, 128, 96, 96]  # 127 / 4 = 31.75 bytes per doubling
    sharp = torch.eye(64)[None].clone() + 1e-9
    drawn = pictures(sharp, 64)[0]
    assert drawn.diagonal().unique().tolist() == [255] and drawn[0, 1] == 1


def test_large_maps_are_averaged_over_visible_keys():
    weights = causal(2, 12)
    ratio, visible = against_uniform(weights)
    drawn = pictures(weights, 4)
    assert drawn.shape == (2, 4, 4) and (drawn[:, 0, 1:] == 0).all() and (drawn.diagonal(dim1=1, dim2=2) > 0).all()
    block = ratio[1, 3:6, 3:6][visible[3:6, 3:6]].mean()
    expected = 128 + 31.75 * torch.log2(block)
    assert float(drawn[1, 1, 1]) == pytest.approx(float(expected), abs=0.51)


def test_data_of_the_atlas_has_all_measurements():
    inspection = made()
    page = render_inspection(inspection, title="Heads", tokens=[WORDS] * 2)
    data = data_of(page)
    assert [layer["heads"] for layer in data["layers"]] == [4, 3, 4]
    first, second, third = data["layers"]
    assert first["kinds"] == ["", "", "induction", ""] and first["scores"]["induction"] == [0.0, 0.0, 0.8, 0.0]
    assert third["redundant"] == [1] and second["redundant"] == []
    assert second["importance"] == pytest.approx(inspection.importance[1, :3].tolist(), rel=1e-3)
    stored = base64.b64decode(first["maps"])
    assert list(stored) == pictures(inspection.maps[0]["layer 0"], 32).flatten().tolist()
    assert (first["rows"], first["columns"]) == (5, 5) and data["thresholds"]["induction"] == 0.3


def test_the_page_starts_with_the_verdict_and_folds_the_evidence():
    inspection = made()
    page = render_inspection(inspection, title="Heads", facts=[("Model", "x")], tokens=[WORDS])
    order = [page.index(part) for part in (verdict(inspection), 'id="atlas"', 'class="fold"', 'class="facts"')]
    assert order == sorted(order)
    assert page.count('<details class="fold">') == page.count('class="fold"') == 5
    only_weights = Inspection([], [], {"weights": inspection.diversity["outputs"]})
    page = render_inspection(only_weights, title="Heads")
    assert 'id="atlas"' not in page and page.count('class="fold" open') == 2 and "<script" not in page


def test_data_never_becomes_markup():
    page = render_inspection(made(), title=EVIL, facts=[(EVIL, EVIL)], tokens=[WORDS] * 2)
    assert "<img" not in page and page.count("<script") == page.count("</script>") == 3
    script = re.search(r"<script>(.*?)</script>", page, re.S)[1]
    assert "innerHTML" not in script and "insertAdjacent" not in script


def test_pictures_and_similarities_shrink_to_fit():
    layers = atlas_layers(made(4, 8, 40))
    whole, coarse, none = (head_atlas(layers, room) for room in (10**6, 20_000, 9_500))
    assert data_of(whole)["layers"][0]["rows"] == 32 and "left out" not in whole
    assert 8 <= data_of(coarse)["layers"][0]["rows"] < 32 and len(coarse) < 26_000
    assert "Pictures are left out" in none and "maps" not in data_of(none)["layers"][0]
    page = render_inspection(made(8, 16, 40), title="x", max_bytes=150_000)
    assert len(page.encode()) <= 150_000 and "grids of pairwise cosines are left out" in page


def test_negative_similarities_have_colours_of_their_own():
    matrix = torch.tensor([[1.0, -0.31], [-0.31, 1.0]])
    assert signed_levels(torch.tensor([-1.0, -0.31, 0.0, 0.04, 0.5])).tolist() == [-9, -3, 0, 0, 4]
    drawn = overlap_grid(matrix, "layer 0")
    assert drawn.count('class="n3"') == 1 and 'class="n3" d="M1 0.5h.9M0 1.5h.9"' in drawn
    signed = grid_rows([Grid("layer 0", matrix, "cosine")])
    assert "<span>−1</span>" in signed and signed.index('<i class="n9">') < signed.index('<i class="n1">')
    assert "−1" not in grid_rows([Grid("layer 0", matrix.abs(), "overlap")])


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_whole(
        tmp_path_factory.mktemp("atlas") / "page.html", render_inspection(made(), title="Heads", tokens=[WORDS] * 2)
    )


@pytest.fixture(scope="module")
def browser():
    with driven_browser() as started:
        yield started


def title(page):
    return page.inner_text("#drawer-title") if page.is_visible("#drawer") else None


@needs_driver
def test_click_keys_and_links_open_the_drawer(browser, path):
    with driven_page(browser, path) as (page, messages):
        assert page.locator(".head").count() == 11 and page.locator(".tiles").count() == 3
        assert title(page) is None
        page.click(".head[data-layer='0'][data-head='3']")
        assert title(page) == "layer 0 · head 3" and page.evaluate("location.hash") == "#L0H3"
        page.keyboard.press("ArrowDown")  # layer 1 has no head 3
        assert title(page) == "layer 1 · head 2"
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowDown")
        assert title(page) == "layer 2 · head 1" and "redundant" in page.inner_text("#drawer-body")
        page.click("#drawer-next")
        page.keyboard.press("ArrowUp")
        assert title(page) == "layer 1 · head 2" and page.evaluate("document.activeElement.id") == "drawer-next"
        page.keyboard.press("Escape")
        assert title(page) is None and page.evaluate("location.hash") == ""
        assert page.evaluate("document.activeElement.dataset.head") == "2"
        page.keyboard.press("Home")
        page.keyboard.press("ArrowUp")
        page.keyboard.press("Enter")
        assert title(page) == "layer 0 · head 0"
        page.evaluate("location.hash = 'L2H3'")
        page.wait_for_function("document.getElementById('drawer-title').textContent === 'layer 2 · head 3'")
        page.evaluate("location.hash = 'L9H9'")  # there is no such head
        page.wait_for_function("document.getElementById('drawer').hidden")
        assert messages == [] and page.title() == "Heads"


@needs_driver
def test_the_drawer_shows_the_numbers_of_its_head(browser, path):
    inspection = made()
    with driven_page(browser, path) as (page, messages):
        page.evaluate("location.hash = 'L0H2'")
        page.wait_for_selector("#drawer svg")
        text = page.inner_text("#drawer-body")
        assert "induction" in text and f"{float(inspection.ablation.change[0, 2]):.3f}" in text
        cosine = inspection.circuits.logits[0].similarity.cosine[2]
        shown = dict(
            zip(
                page.locator(".bar span:first-child").all_inner_texts(),
                page.locator(".bar .value").all_inner_texts(),
                strict=True,
            )
        )
        assert len(shown) == 3
        for other in (0, 1, 3):
            assert float(shown[f"head {other}"].replace("−", "-")) == pytest.approx(float(cosine[other]), abs=0.006)
        assert EVIL[:15] in page.locator("#drawer svg").last.text_content()
        page.select_option("#drawer-example", "1")
        cells = page.locator("#drawer .touch")
        box = cells.bounding_box()
        page.mouse.move(box["x"] + 3, box["y"] + box["height"] - 3)
        value = page.inner_text(".drawer-readout").rsplit(" · ", 1)[1]
        assert float(value) == pytest.approx(float(inspection.maps[1]["layer 0"][2, 4, 0]), abs=7e-4)
        assert messages == []


@needs_driver
def test_pictures_have_the_colours_of_their_bytes(browser, path):
    with driven_page(browser, path) as (page, _):
        pixels = page.evaluate(
            """() => { const canvas = document.querySelector(".tiles");  // four heads of 5 x 5 pixels side by side
                 return canvas.width === 20 && [...canvas.getContext("2d").getImageData(10, 0, 5, 5).data]; }"""
        )
    cells = [tuple(pixels[at : at + 4]) for at in range(0, len(pixels), 4)]
    drawn = pictures(made().maps[0]["layer 0"], 32)[2].flatten().tolist()
    assert len(cells) == 25
    for colour, byte in zip(cells, drawn, strict=True):
        if byte == 0:
            assert colour[3] == 0
        elif byte > 170:
            assert colour[2] > colour[0] + 10  # blue: more than uniform
        elif byte < 90:
            assert colour[0] > colour[2]  # warm: less than uniform
    assert cells[0] == (255, 255, 255, 255)  # the first query sees one key


@needs_driver
def test_rows_are_drawn_when_they_come_into_view(browser, tmp_path):
    large = write_whole(tmp_path / "large.html", render_inspection(made(60, 20, 6, 1), title="Heads"))
    with driven_page(browser, large, width=390) as (page, messages):
        page.set_viewport_size({"width": 390, "height": 300})
        page.reload()
        page.evaluate("document.getElementById('atlas-grid').scrollIntoView()")
        page.wait_for_selector(".tiles")
        before, cells = page.locator(".atlas-row:has(canvas)").count(), page.locator(".head").count()
        assert 0 < before < 60 and 0 < cells < 60 * 20 - 1
        page.evaluate("document.querySelector('.atlas-row:last-child').scrollIntoView()")
        page.wait_for_selector(".atlas-row:last-child canvas")
        page.wait_for_function(
            "!document.querySelector('.atlas-row:nth-child(2) canvas')"
        )  # rows out of view are freed
        page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
        assert page.locator(".atlas-row:has(canvas)").count() == 60 and messages == []


SCROLL = """() => new Promise((done) => {
  const end = document.documentElement.scrollHeight, times = [];
  let last = null, at = 0;
  const frame = (now) => {
    if (last !== null) times.push(now - last);
    last = now;
    at += 60;
    window.scrollTo(0, at);
    if (at < end) requestAnimationFrame(frame);
    else done(times.sort((a, b) => a - b)[times.length >> 1]);
  };
  requestAnimationFrame(frame);
})"""


@needs_driver
@pytest.mark.slow
def test_2048_heads_scroll_smoothly(browser, tmp_path):
    """Median time of a frame while scrolling: 17 ms; with one canvas per head it was 117 ms."""
    large = write_whole(tmp_path / "large.html", render_inspection(made(32, 64, 24, 1), title="Heads"))
    assert large.stat().st_size < 5_000_000
    with driven_page(browser, large) as (page, messages):
        page.wait_for_selector(".tiles")
        assert page.locator("canvas").count() <= 32
        assert page.evaluate(SCROLL) < 80 and messages == []


@needs_driver
@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_the_screen_prints_and_is_accessible(browser, path, dark, width):
    with driven_page(browser, path, dark=dark, width=width) as (page, messages):
        for fragment in ("", "L1H1"):
            page.evaluate(f"location.hash = '{fragment}'")
            wide = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
            assert wide[0] <= wide[1]
        page.wait_for_selector("#drawer svg")
        assert page.evaluate("document.getElementById('drawer').offsetWidth") == (390 if width == 390 else 480)
        page.emulate_media(media="print")
        assert not page.is_visible("#drawer") and page.is_visible(".head")
        assert messages == []
    assert violations(browser, path, "L0H2" if width == 390 else "", dark=dark, width=width) == []
