"""The documentation site builds without a warning, is whole, and asks for nothing outside of itself."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import repulsive
from tests.docs.html_pages import dead_links, is_external, pages
from tests.pages.browser import driven_browser, driven_page, needs_driver, violations

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
pytest.importorskip("latex2mathml")

CLOSED = "http://127.0.0.1:9"  # nobody listens there: whatever asks for something outside fails


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    offline = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), CLOSED)
    finished = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **offline, "NO_PROXY": "", "NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return folder


@pytest.fixture(scope="module")
def found(site):
    return pages(site)


@pytest.fixture(scope="module")
def browser():
    with driven_browser() as opened:
        yield opened


def test_every_page_of_docs_is_on_the_site_and_in_its_navigation(site, found):
    start = found[site / "index.html"].links
    for source in (ROOT / "docs").rglob("*.md"):
        page = source.relative_to(ROOT / "docs").with_suffix(".html")
        assert site / page in found
        assert page.as_posix() in start or page.name == "index.html"


def test_pages_of_notebooks_show_their_figures(site, found):
    drawn = [path.stem for path in (ROOT / "examples").glob("*.ipynb") if "plt.show()" in path.read_text()]
    assert len(drawn) == 2
    for name in drawn:
        page = found[site / "repository" / "examples" / f"{name}.html"]
        assert any(asset.endswith(f"/notebook-{name}.svg") for asset in page.assets), "run docs/pictures/notebooks.py"


def test_nothing_is_fetched_from_elsewhere(site, found):
    assert {page.path.name: asset for page in found.values() for asset in page.assets if is_external(asset)} == {}
    for sheet in site.rglob("*.css"):
        asked = re.findall(r"(?:url\(|@import)\s*['\"]?([^'\")\s]+)", sheet.read_text(encoding="utf-8"))
        assert [address for address in asked if is_external(address)] == []


def test_links_and_anchors_within_the_site_exist(found):
    assert len(found) > 20
    assert dead_links(found) == []


def test_dead_links_are_seen(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#no">x</a><a href="c.html">y</a><a href="#here" id="here">z</a>')
    (tmp_path / "b.html").write_text('<a id="yes" href="https://elsewhere/d.html"><img src="none.png">')
    assert dead_links(pages(tmp_path)) == [
        "a.html: b.html#no (no such anchor)",
        "a.html: c.html",
        "b.html: none.png",
    ]
    assert is_external("//elsewhere/x.js") and is_external("https://elsewhere") and not is_external("x.js?a#b")


def test_the_reference_has_every_public_name(found, site):
    ends = {anchor.rsplit(".", 1)[-1] for anchor in found[site / "api" / "index.html"].anchors if "." in anchor}
    assert set(repulsive.__all__) - {"__version__"} <= ends


def test_the_reference_has_every_verb(found, site):
    from repulsive.cli.app import verbs

    anchors = found[site / "api" / "cli.html"].anchors
    assert [verb for verb in verbs() if not any(anchor.startswith(verb) for anchor in anchors)] == []


def test_formulas_are_drawn_by_the_browser_alone(site):
    texts = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert [path.name for path, text in texts.items() if "arithmatex" in text] == []
    for name in ("how-it-works.html", "api/index.html"):
        assert texts[site / name].count("<math") > 10


@needs_driver
@pytest.mark.parametrize("name", ["index.html", "api/index.html", "how-it-works.html"])
@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["light", "dark"])
def test_pages_render_from_disk_without_a_word_on_the_console(browser, site, name, dark):
    with driven_page(browser, site / name, dark=dark) as (page, said):
        page.wait_for_selector("article h1")
        assert page.evaluate("[...document.images].every((image) => image.complete && image.naturalWidth > 0)")
        assert page.evaluate("[...document.querySelectorAll('math')].every((m) => m.getBoundingClientRect().width > 4)")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert [word for word in said if not word.startswith(site.as_uri())] == []


BROKEN_WORDS = """() => {
  const broken = [];
  for (const code of document.querySelectorAll("article table code")) {
    const text = code.firstChild, range = document.createRange();
    for (const word of text.data.matchAll(/[\\w.="']{2,}/g)) {
      range.setStart(text, word.index); range.setEnd(text, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map((box) => box.top)).size > 1) broken.push(word[0]);
    }
  }
  return broken;
}"""


@needs_driver
def test_settings_in_tables_are_not_broken_on_a_phone(browser, site):
    with driven_page(browser, site / "choosing.html", width=390) as (page, _):
        page.wait_for_selector("article table code")
        assert page.evaluate(BROKEN_WORDS) == []
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@needs_driver
@pytest.mark.parametrize("name", ["index.html", "choosing.html"])
@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["light", "dark"])
def test_pages_can_be_read_by_all(browser, site, name, dark):
    wrong = violations(browser, site / name, dark=dark)
    # The theme gives every button that copies code a landmark of its own.
    assert [line for line in wrong if not line.startswith("landmark-unique")] == []


@needs_driver
def test_search_works_from_disk(browser, site):
    with driven_page(browser, site / "index.html") as (page, said):
        page.click("input[name=query]")
        page.locator("input[name=query]").press_sequentially("bandwidth")
        page.wait_for_selector(".md-search-result__item a[href*='how-it-works.html']", state="attached")
        assert [word for word in said if not word.startswith(site.as_uri())] == []
