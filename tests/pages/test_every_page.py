"""Every kind of page in a real browser, on a phone, a tablet and a desktop, light and dark: errors, overflow, looks.

Screenshots are compared with stored ones at a quarter of their size. Both are averaged over blocks, so that other fonts
hardly matter while a missing or misplaced part does. After a wanted change, look at the pages and store them again:

    UPDATE_SCREENSHOTS=1 pytest tests/pages/test_every_page.py -m slow
"""

import io
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from repulsive.diagnostics.model_comparison import Difference, ModelComparison
from repulsive.diagnostics.patches import PatchLayout
from repulsive.lab.judge.make import make as make_judging_page
from repulsive.pages import write_report
from repulsive.pages.comparison_page import render_comparison
from repulsive.pages.data.pictures import Pictures
from repulsive.pages.html.document import write_whole
from repulsive.pages.inspection_page import render_inspection
from tests.lab.judge.sample import two_systems
from tests.pages import test_layer_explorer, test_picture_map
from tests.pages.browser import driven_browser, driven_page, needs_driver, violations
from tests.pages.sample import sample_content
from tests.pages.test_atlas import made
from tests.pages.test_report_in_browser import report_content

Image = pytest.importorskip("PIL.Image")
pytestmark = [needs_driver, pytest.mark.slow]

FOLDER = Path(__file__).parent / "screenshots"
WIDTHS, HEIGHT, SHRINK = (390, 820, 1280), 1600, 4
BLOCK = 6  # stored pixels: 24 pixels of the page, about a line of text
TOLERANCE = 6.0  # mean difference of blocks, of 255
MAX_BYTES = 100_000
TOKENS = [["the", "movie", "was", "slow", "but", "the", "music", "was", "very", "good", "indeed", "."]] * 2


def photograph():
    """A generated picture: discs on a gradient."""
    size = 224
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    pixels = torch.stack([60 + 0 * x, 90 + y // 4, 200 - y // 3], -1)
    for at, colour in (((60, 70), (230, 120, 60)), ((150, 90), (60, 200, 180)), ((110, 170), (240, 210, 80))):
        pixels[(y - at[0]) ** 2 + (x - at[1]) ** 2 < 30**2] = torch.tensor(colour)
    file = io.BytesIO()
    Image.frombytes("RGB", (size, size), bytes(pixels.flatten().tolist())).save(file, "JPEG", quality=85)
    return file.getvalue()


def inspect_text(path):
    return write_whole(path, render_inspection(made(6, 8, 12), title="Heads of a text model", tokens=TOKENS))


def inspect_images(path):
    layout = PatchLayout(14, 14, ("class", "register 0"), (16, 16))
    pictures = Pictures(layout, ["discs.png", "again.png"], [photograph()] * 2)
    return write_whole(
        path, render_inspection(test_picture_map.made(2, 6, layout, 6), title="Heads of a ViT", pictures=pictures)
    )


def compare(path):
    before, after = made(6, 8, 12), made(6, 8, 12)
    columns = [[(h, h) for h in range(8 - (row == 1))] for row in range(6)]
    columns[2] = [(0, 0), (1, None), *((h, h - 1) for h in range(2, 8))]
    after.layers[2] = (*after.layers[2][:3], 7)
    for maps in after.maps:
        maps["layer 2"] = maps["layer 2"][1:]
        maps["layer 0"] = maps["layer 0"].flip(0)
    comparison = ModelComparison(before, after, columns, Difference((0.4, 0.5, 0.45, 0.5), (0.3, 0.38, 0.36, 0.41)))
    return write_whole(path, render_comparison(comparison, title="Heads of two models", tokens=TOKENS))


def judge(path):
    make_judging_page(*two_systems(path.parent), path)
    return path


PAGES = {
    "inspect-text": inspect_text,
    "inspect-images": inspect_images,
    "compare": compare,
    "demo": lambda path: write_report(path, sample_content()),
    "report": lambda path: write_report(path, replace(report_content(), table=None, charts=[], facts=())),  # panels
    "report-layers": lambda path: write_report(path, test_layer_explorer.content()),
    "judge": judge,
}


@pytest.fixture(scope="module")
def browser():
    with driven_browser() as started:
        yield started


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    return {kind: Path(make(folder / f"{kind}.html")) for kind, make in PAGES.items()}


def shrunk(screenshot):
    image = Image.open(io.BytesIO(screenshot)).convert("RGB")
    return image.resize((image.width // SHRINK, image.height // SHRINK), Image.Resampling.BOX)


def blocks(image):
    """Mean colour of each block, float [rows, columns, 3]."""
    small = image.convert("RGB").resize((image.width // BLOCK, image.height // BLOCK), Image.Resampling.BOX)
    return torch.tensor(list(small.tobytes())).view(small.height, small.width, 3).double()


def difference(first, second):
    return float((blocks(first) - blocks(second)).abs().mean())


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", PAGES)
def test_no_errors_no_overflow_and_the_stored_looks(browser, pages, kind, width, dark):
    with driven_page(browser, pages[kind], dark=dark, width=width) as (page, messages):
        page.set_viewport_size({"width": width, "height": HEIGHT})
        page.wait_for_timeout(100)
        wide = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert wide[0] <= wide[1], "the page is wider than the screen"
        taken = shrunk(page.screenshot())
        assert messages == []
    stored = FOLDER / f"{kind}-{width}-{'dark' if dark else 'light'}.png"
    if os.environ.get("UPDATE_SCREENSHOTS"):
        FOLDER.mkdir(exist_ok=True)
        taken.quantize(64).save(stored, optimize=True)
    assert stored.is_file(), f"no {stored.name}; store it as described at the top of this file"
    assert stored.stat().st_size <= MAX_BYTES
    expected = Image.open(stored)
    assert expected.size == taken.size
    changed = difference(taken, expected)
    assert changed <= TOLERANCE, f"{stored.name} differs by {changed:.1f} of 255 on average"


def test_on_a_phone_words_keep_their_numbers_and_wide_tables_have_a_shade(browser, pages):
    with driven_page(browser, pages["demo"], width=390) as (page, _):
        lines = page.evaluate("[...document.querySelectorAll('.evidence .e')].map(e => e.getClientRects().length)")
        wide = page.evaluate(
            "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
        )
        shade = page.evaluate("getComputedStyle(document.querySelector('.scroll')).backgroundImage")
    assert set(lines) <= {0, 1} and 1 in lines  # 0: in an example that is not shown
    assert wide and shade.count("linear-gradient") == 2


def test_the_comparison_ignores_fonts_and_notices_missing_parts(browser, pages):
    stored = {kind: Image.open(FOLDER / f"{kind}-1280-light.png") for kind in ("inspect-text", "inspect-images")}
    dark = Image.open(FOLDER / "inspect-text-1280-dark.png")
    assert difference(stored["inspect-text"], dark) > 10 * TOLERANCE
    assert difference(stored["inspect-text"], stored["inspect-images"]) > TOLERANCE
    with driven_page(browser, pages["inspect-text"]) as (page, _):
        page.set_viewport_size({"width": 1280, "height": HEIGHT})
        page.evaluate("document.documentElement.style.setProperty('font-family', 'serif')")
        page.evaluate("document.body.style.setProperty('font-family', 'serif')")
        assert difference(shrunk(page.screenshot()), stored["inspect-text"]) <= TOLERANCE
        page.evaluate("document.getElementById('atlas').hidden = true")
        assert difference(shrunk(page.screenshot()), stored["inspect-text"]) > TOLERANCE


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("kind", PAGES)
def test_axe_finds_nothing_wrong(browser, pages, kind, dark):
    assert violations(browser, pages[kind], dark=dark, width=1280 if dark else 390) == []
