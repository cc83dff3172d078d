"""The tables of results/headline.md agree with the files in results/."""

import json
from pathlib import Path

import pytest

from tests.scripts import study

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def headline():
    with study("studies.headline") as module:
        yield module


def table(**accuracy):
    """Rows as the studies write them."""
    rows = [{"label": label, "cells": {"bleu": {"mean": x}}, "against": {}} for label, x in accuracy.items()]
    seen = {"difference": 0.5, "low": -0.25, "high": 1.0, "seeds": 3}
    rows[-1]["against"] = {"bleu": seen}
    return {"rows": rows}


def test_the_page_is_up_to_date(headline):
    page = (ROOT / "results" / "headline.md").read_text(encoding="utf-8")
    assert headline.replaced(page, headline.block(ROOT / "results")) == page, "run: python -m studies.headline"


def test_results_are_json_for_every_reader():
    for path in (ROOT / "results").rglob("*.json"):
        json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda word: pytest.fail(f"{word} in results/"))


def test_numbers_are_those_of_the_files(headline):
    rows = json.loads((ROOT / "results" / "classification" / "yelp.json").read_text())["rows"]
    plain, ours = (next(row for row in rows if row["label"] == label) for label in ("MA", "SVGD"))
    line = next(line for line in headline.quality(ROOT / "results").splitlines() if line.startswith("| yelp |"))
    assert f"| {100 * plain['cells']['accuracy']['mean']:.2f} | {100 * ours['cells']['accuracy']['mean']:.2f} |" in line
    assert f"{100 * ours['against']['accuracy']['low']:+.2f}, {100 * ours['against']['accuracy']['high']:+.2f}]" in line
    assert line.endswith("| +1.90 |")  # 71.2 - 69.3


def test_classifiers_at_the_papers_sizes_have_rows_of_their_own(headline):
    summary = json.loads((ROOT / "results" / "classification" / "paper_sizes.json").read_text())["age"]
    control = summary["controls"]["ma@svgd"]
    plain, ours = (100 * row["test"]["accuracy"]["mean"] for row in (control, summary["arms"]["svgd"]))
    lines = headline.quality(ROOT / "results").splitlines()
    title = "| age, the paper's sizes, first round, plain at the same settings |"
    line = next(line for line in lines if line.startswith(title))
    assert f"| {plain:.2f} | {ours:.2f} | {100 * control['of']['svgd']['accuracy']['difference']:+.2f} [" in line
    assert line.endswith("| 28 | +0.35 |")
    assert not any("yelp" in line and "same settings" in line for line in lines)  # plain attention has them anyway


def test_missing_results_give_no_rows(headline, tmp_path):
    assert headline.quality(tmp_path) == "" and headline.costs(tmp_path) == ""
    (tmp_path / "translation").mkdir()
    (tmp_path / "translation" / "question.json").write_text("[]")
    assert headline.quality(tmp_path) == ""


def test_new_studies_are_found_in_their_folders(headline, tmp_path):
    for folder, name, value in (
        ("translation", "iwslt14", {"test": table(MA=34.0, SVGD=34.5), "newstest": {}}),
        ("graphs", "agenda", table(GW=13.0, **{"GW + RMA": 13.5})),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.json").write_text(json.dumps(value))
    systems = {name: {"means": {"mean": {"0": 80.0, "1": 81.0}}} for name in ("ma", "svgd")}
    seen = {"svgd": {"mean": {"difference": 0.0, "low": -1.0, "high": 1.0, "seeds": 2}}}
    (tmp_path / "pretraining").mkdir()  # where studies/pretraining/run.py writes
    (tmp_path / "pretraining" / "glue.json").write_text(json.dumps({"systems": systems, "against": seen}))
    assert headline.quality(tmp_path).splitlines()[2:] == [
        "| iwslt14 | BLEU | 34.00 | 34.50 | +0.50 [-0.25, +1.00] | 3 | +0.80 |",
        "| agenda | BLEU-4 | 13.00 | 13.50 | +0.50 [-0.25, +1.00] | 3 | +1.37 |",
        "| GLUE, the rule as published | mean | 80.50 | 80.50 | +0.00 [-1.00, +1.00] | 2 | +0.30 |",
    ]
    seen["svgd"]["mean"] |= {"seeds": 1, "pretrainings": 2}
    (tmp_path / "pretraining" / "glue.json").write_text(json.dumps({"systems": systems, "against": seen}))
    assert "| 1 (2 pre-trainings) | +0.30 |" in headline.quality(tmp_path)


def test_the_block_is_replaced_and_nothing_else(headline, tmp_path):
    page, results = tmp_path / "measured.md", tmp_path / "results"
    page.write_text(f"before\n\n{headline.BEGIN}\nold\n{headline.END}\n\nafter\n")
    assert headline.main(["--page", str(page), "--results", str(results), "--check"]) == 1
    assert headline.main(["--page", str(page), "--results", str(results)]) == 0
    text = page.read_text()
    assert text.startswith("before\n\n") and text.endswith("\n\nafter\n") and "old" not in text
    assert headline.main(["--page", str(page), "--results", str(results), "--check"]) == 0
    with pytest.raises(ValueError, match="once each"):
        headline.replaced("no comments", "x")
