"""The report page in a real browser, offline: mouse, keyboard, small screens, dark mode."""

import re

import pytest
import torch

from repulsive.diagnostics.calibration import reliability
from repulsive.diagnostics.head_count import HeadCount, HeadFit
from repulsive.pages import Chart, Content, Grid, Panel, Series, Sheet, write_report
from repulsive.pages.charts import heads_chart, redundancy_charts, reliability_charts
from tests.pages.browser import driven_browser, driven_page, needs_driver, violations
from tests.pages.sample import METHODS, sample_content

pytestmark = needs_driver


def report_content() -> Content:
    base = sample_content(3)
    make = torch.Generator().manual_seed(0)
    changes = {method: torch.randn(10, generator=make) for method in METHODS}
    p = (2 * torch.randn(200, 5, generator=make)).softmax(-1)
    diagram = reliability(p, p.argmax(-1).where(torch.rand(200, generator=make) < 0.6, torch.tensor(0)))
    counts = [HeadCount(m, (20 + 5 / m, 21 + 5 / m)) for m in (1, 4, 16)]
    columns = ["method", *(f"a column of numbers {i}" for i in range(8))]
    panels = [
        Panel("Similarity", ["Some text."], [Grid(method, torch.eye(10), "cosine of weights") for method in METHODS]),
        Panel("Redundancy", charts=redundancy_charts(changes, "change of accuracy")),
        Panel("Calibration", charts=reliability_charts(dict.fromkeys(METHODS, diagram))),
        Panel(
            "Number of heads",
            charts=[heads_chart({"MA": counts}, {"MA": HeadFit(5, 0.01, 20)}, "error (%)")],
            sheets=[Sheet("Wide", columns, [[method, *["0.123 ± 0.456"] * 8] for method in METHODS])],
        ),
    ]
    endless = "anamewithoutend" * 9
    lines = [Series(endless, [(0, 1), (1, 2)]), Series("MA", [(0, 2), (1, 1)])]
    panels.append(Panel(endless, [endless], charts=[Chart(endless, lines)], notes=[endless]))
    return Content(base.title, base.lead, base.facts, base.table, base.charts, base.examples, panels=panels)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_report(tmp_path_factory.mktemp("driven") / "report.html", report_content())


@pytest.fixture(scope="module")
def browser():
    with driven_browser() as started:
        yield started


def test_the_explorer_follows_clicks_and_keys(browser, path):
    with driven_page(browser, path) as (page, messages):
        page.click("#next")
        assert page.evaluate("location.hash") == "#example=2&view=overall"
        assert page.is_visible("#example-2 .cards") and not page.is_visible("#example-1")
        page.focus("input[value=overall]")
        page.keyboard.press("ArrowRight")  # the next radio button
        assert page.is_checked("input[value=heads]") and page.is_visible("#example-2 .heads")
        page.keyboard.press("ArrowRight")
        page.focus("#head")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert page.evaluate("location.hash") == "#example=2&view=head&head=2"
        assert "head 2, peak on" in page.inner_text("#example-2 .card:nth-child(2) .peaks")
        page.select_option("#pick", "3")
        page.hover("#example-3 .card .w")
        assert re.search(r"MA · head 2 · “.+” · 0\.\d{3}", page.inner_text("#readout"))
        assert messages == []


def test_controls_can_be_reached_by_keyboard_and_have_names(browser, path):
    with driven_page(browser, path) as (page, _):
        reached = []
        for _ in range(12):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.id || document.activeElement.ariaLabel"))
            drawn = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            radio = page.evaluate("document.activeElement.name") == "view"  # its label has the outline
            assert drawn == "solid" or radio or page.evaluate("document.activeElement === document.body")
        assert {"pick", "next", "Table of results", "Wide"} <= set(reached)
        unnamed = page.evaluate(
            """() => [...document.querySelectorAll("input, select, button, svg[role=img], [role=region]")].filter(
                 (x) => !(x.getAttribute("aria-label") || x.textContent.trim() || (x.labels && x.labels.length)))
                 .map((x) => x.outerHTML.slice(0, 80))"""
        )
        assert unnamed == []
        loose = page.evaluate(
            "() => [...document.querySelectorAll('th')].filter((x) => !x.scope).length + "
            "[...document.querySelectorAll('svg')].filter((x) => !x.hasAttribute('role') && !x.ariaHidden).length"
        )
        assert loose == 0
        levels = [
            int(tag[1])
            for tag in page.evaluate("() => [...document.querySelectorAll('h1, h2, h3, h4')].map((x) => x.tagName)")
        ]
        assert levels[0] == 1 and levels.count(1) == 1


@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_fits_the_screen_and_labels_are_large_enough(browser, path, dark, width):
    with driven_page(browser, path, dark=dark, width=width) as (page, messages):
        for view in ("overall", "heads", "head"):
            page.evaluate(f"location.hash = 'example=1&view={view}'")
            wide = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
            assert wide[0] <= wide[1], f"{view}: the page is wider than the screen"
        shades = page.evaluate("getComputedStyle(document.body).backgroundColor")
        red = int(re.findall(r"\d+", shades)[0])
        assert red < 40 if dark else red > 230
        small = page.evaluate(
            """() => [...document.querySelectorAll(".charts .tick")].map((text) => parseFloat(
                 getComputedStyle(text).fontSize) * text.getScreenCTM().a).filter((size) => size < 10)"""
        )
        assert small == [], "labels of charts are too small to read"
        fills = page.evaluate(
            """() => ["bars", "band", "dot"].map((kind) => getComputedStyle(document.querySelector("." + kind)).fill)"""
        )
        assert all(fill not in ("rgb(0, 0, 0)", "none") for fill in fills)
        assert messages == []


@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["light", "dark"])
@pytest.mark.parametrize(
    "view", ["overall", *(pytest.param(view, marks=pytest.mark.slow) for view in ("heads", "head"))]
)
def test_axe_finds_nothing_wrong(browser, path, dark, view):
    assert violations(browser, path, f"view={view}", dark=dark, width=1280 if dark else 360) == []


def test_methods_can_be_hidden(browser, path):
    with driven_page(browser, path) as (page, messages):
        page.uncheck("input[name=runs][value='2']", force=True)
        page.focus("input[name=runs][value='4']")
        page.keyboard.press("Space")
        assert page.evaluate("location.hash") == "#example=1&view=overall&runs=1,3"
        shown = page.locator("#example-1 .card:visible h3").all_inner_texts()
        assert shown == ["MA", "SVGD"]
        page.check("input[value=heads]", force=True)
        assert page.locator("#example-1 .maps:visible").count() == 2
        page.check("input[name=runs][value='2']", force=True)
        page.check("input[name=runs][value='4']", force=True)
        assert "runs" not in page.evaluate("location.hash") and page.locator("#example-1 .maps:visible").count() == 4
        assert messages == []


@pytest.mark.parametrize("width", [390, 1280])
def test_tick_labels_are_not_cut_off(browser, tmp_path, width):
    """A minus sign cut off by the edge of the drawing would change the number."""
    ends = [(-0.000123, -0.00012), (1e-5, 5e-5), (-1234.0, 1234.0), (88_888.0, 99_999.5)]
    charts = [Chart(f"chart {i}", [Series("MA", [(0.0, a), (9.0, b)])]) for i, (a, b) in enumerate(ends)]
    page_of = write_report(tmp_path / "axes.html", Content("Axes", charts=charts, panels=[Panel("Few", charts=charts)]))
    with driven_page(browser, page_of, width=width) as (page, _):
        cut = page.evaluate(
            "[...document.querySelectorAll('.tick.y')].filter((tick) => tick.getBoundingClientRect().left + 0.5 <"
            " tick.closest('svg').getBoundingClientRect().left).map((tick) => tick.textContent)"
        )
    assert cut == []
