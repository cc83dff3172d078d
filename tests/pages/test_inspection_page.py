"""The page, the text and the JSON of an inspection."""

import html
import json

import pytest
import torch

from repulsive.diagnostics.inspection import inspect_heads
from repulsive.diagnostics.summary import as_json, as_text
from repulsive.diagnostics.verdict import verdict
from repulsive.pages.html.document import write_whole
from repulsive.pages.inspection_page import layered_examples, render_inspection
from tests.diagnostics.masked_lm import grids_of, masked_lm, text
from tests.heads.zoo import build, ids
from tests.pages.browser import driven_browser, driven_page, needs_browser, needs_driver, open_page, violations

transformers = pytest.importorskip("transformers")


def test_page_text_and_json_have_the_numbers(tmp_path):
    model, batches = masked_lm(), text()
    found = inspect_heads(model, batches, ablation=True)
    tokens = [[f"<w{place}>" for place in range(7)] for _ in range(2)]
    path = write_whole(tmp_path / "deep" / "page.html", render_inspection(found, title="Heads of <x>", tokens=tokens))
    page = path.read_text()
    assert page.count("<script") == 3 and "http" not in page.replace("http-equiv", "")
    assert page.count("Heads of &lt;x&gt;") == 2 and "<x>" not in page
    assert "\\u003cw3\\u003e" in page and "<w3>" not in page
    assert f"{found.diversity['outputs'][1].effective_heads:.2f}" in page
    assert "Exact ablation of one head" in page and "% of heads" in page
    assert [p.name for p in path.parent.iterdir()] == ["page.html"]
    text_summary = as_text(found)
    assert text_summary.startswith(f"{verdict(found)}\n\n") and html.escape(verdict(found)) in page
    last = found.diversity["outputs"][-1]
    assert (
        page.count('<th scope="col">cosine of tokens</th>')
        == text_summary.count("  cosine of tokens  effective heads\n")
        == 1
    )
    assert f"<td>{last.tokens:.3f}</td></tr>" in page and f"{last.mean_distance:.4g}" in text_summary
    assert text_summary.split("effective heads\n")[-1].splitlines()[1].split()[-2] == f"{last.tokens:+.3f}"
    best = found.closest("weights", 1)[0]
    assert f"{best.name}  {best.first} and {best.second}  {best.cosine:+.3f}" in text_summary
    lowest = found.least(found.ablation.change, 1)[0]
    assert f"{lowest[0]}  {lowest[1]}     {lowest[2]:.4g}" in text_summary
    assert found.pruned.metric[0] == 0 and found.pruned.removed[-1] == len(found.pruned.order) == 8
    assert "Least important heads first" in page
    numbers = json.loads(json.dumps(as_json(found), allow_nan=False))
    assert numbers["pruning"]["change"] == list(found.pruned.metric)
    assert numbers["ablation"]["change"][1][3] == pytest.approx(float(found.ablation.change[1, 3]))
    assert numbers["diversity"]["outputs"][-1]["mean_cosine_of_tokens"] == last.tokens
    assert "mean_cosine_of_tokens" not in numbers["diversity"]["attention"][-1]
    assert numbers["diversity"]["attention"][0]["effective_heads"] == found.diversity["attention"][0].effective_heads


@needs_browser
def test_a_browser_reports_no_errors(tmp_path):
    found = inspect_heads(masked_lm(), text(), ablation=True)
    path = write_whole(tmp_path / "page.html", render_inspection(found, title="Heads", tokens=[list("abcdefg")]))
    opened = open_page(path, "example=1")  # unfolds the explorer
    assert opened.console == []
    assert opened.dom.count('class="overlap"') == grids_of(found)
    assert opened.dom.count('class="alone"') == 4 and 'class="h9"' in opened.dom  # all heads of the first layer


@needs_driver
@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["light", "dark"])
def test_the_page_fits_a_phone_and_passes_axe(tmp_path, dark):
    found = inspect_heads(masked_lm(), text(), ablation=True)
    path = write_whole(tmp_path / "page.html", render_inspection(found, title="Heads", tokens=[list("abcdefg")]))
    with driven_browser() as browser:
        with driven_page(browser, path, dark=dark, width=360) as (page, console):
            page.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
            wide = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
            names = page.evaluate(
                """() => [...document.querySelectorAll(".scroll")].map(
                     (box) => box.querySelector("tbody th").offsetWidth / box.offsetWidth)"""
            )
            assert wide[0] <= wide[1] and names and max(names) < 0.5  # names stay visible and leave room for numbers
            assert console == []
        assert violations(browser, path, "heads=mean", dark=dark, width=360) == []


def test_maps_show_tokens_or_numbered_positions_without_padding():
    batch = {"input_ids": ids(), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    batch["attention_mask"][1, 4:] = 0
    found = inspect_heads(masked_lm(), [batch])
    assert [maps["bert.encoder.layer.0.attention.self"].shape for maps in found.maps] == [(4, 7, 7), (4, 4, 4)]
    first, second = layered_examples(found, [list("abcdefg")])
    assert (first.texts, second.texts) == ({"text": list("abcdefg")}, {"4 positions": list("0123")})
    assert [maps.layer for maps in first.readings["model"]] == ["layer 0", "layer 1"]
    image, inputs = build("vit, sdpa")
    (example, _) = layered_examples(inspect_heads(image, [inputs]), [])
    assert list(example.texts) == ["5 positions"]


@needs_driver
def test_tokens_beside_a_map_are_not_cut_off(tmp_path):
    found = inspect_heads(masked_lm(), text()[:1])
    words = [["a" * 60, "漢字" * 9, "Ġthe", "▁" * 20, "x", "nnnnnnnnnnnnnnnn", "."]]
    page_of = write_whole(tmp_path / "words.html", render_inspection(found, title="words", tokens=words))
    with driven_browser() as browser, driven_page(browser, page_of, width=390) as (page, _):
        page.evaluate("location.hash = 'example=1'")
        page.wait_for_selector("#stage text")
        cut = page.evaluate(
            "[...document.querySelectorAll('#stage text')].filter((text) => { const box = text.getBoundingClientRect(),"
            " all = text.closest('svg').getBoundingClientRect(); return box.left + 0.5 < all.left || box.top + 0.5 <"
            " all.top; }).map((text) => text.textContent)"
        )
        assert page.locator("#stage text").count() > 7 and cut == []
