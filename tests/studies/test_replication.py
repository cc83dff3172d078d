"""The table and figure of docs/replication.md agree with the files in results/, and verdicts follow their rule."""

import json
import lzma
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.scripts import study

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def replication():
    with study("studies.replication") as module:
        yield module


def test_the_page_and_the_figure_are_up_to_date(replication):
    rows = replication.claims()
    page = replication.PAGE.read_text(encoding="utf-8")
    assert replication.replaced(page, replication.block(rows)) == page, "run: python -m studies.replication"
    assert replication.draw(rows) == replication.FIGURE.read_text(encoding="utf-8"), (
        "run: python -m studies.replication"
    )


@pytest.mark.parametrize(
    ("paper", "low", "high", "options", "verdict"),
    [
        (0.8, 0.1, 2.0, {}, "holds"),
        (0.8, -1.0, 0.5, {}, "fails"),
        (0.8, -1.0, 0.9, {}, "cannot say"),
        (None, -2.0, -1.0, {}, "fails"),
        (None, -2.0, -1.0, {"lower": True}, "holds"),
        (None, -2.0, 1.0, {"lower": True}, "cannot say"),
        (-3.0, -2.0, 1.0, {"lower": True}, "fails"),
        (0.8, 0.1, 2.0, {"other_data": "smaller data"}, "same claim, smaller data: holds"),
        (0.8, -1.0, 0.9, {"other_data": "smaller data"}, "cannot say"),
        (13.0, -0.2, 1.3, {"is_limit": True}, "holds"),
        (1.0, 1.1, 1.3, {"is_limit": True}, "fails"),
    ],
)
def test_verdicts(replication, paper, low, high, options, verdict):
    ours = replication.Gain((low + high) / 2, low, high)
    assert replication.Claim("", paper, ours, "", "", **options).verdict == verdict


def test_welch_interval(replication, monkeypatch):
    """Two rows with six seeds and equal deviations: ten degrees of freedom, t = 2.228."""
    rows = [
        {"label": label, "seeds": list(range(6)), "cells": {"dist": {"mean": mean, "deviation": 0.3}}}
        for label, mean in (("MA", 1.0), ("SVGD", 1.5))
    ]
    monkeypatch.setattr(replication, "read", lambda name: {"rows": rows})
    found = replication.unpaired("any", "SVGD", "dist")
    assert found.mean == pytest.approx(0.5)
    assert found.high - found.mean == pytest.approx(2.228 * 0.3 * (2 / 6) ** 0.5, rel=1e-3)


def test_the_seeds_behind_the_redundant_heads(replication):
    """The page says that all heads whose removal helps belong to one seed of the published rule."""
    changes = json.loads((ROOT / "results" / "translation" / "redundancy.json").read_text())
    counts = {name: sorted(sum(x > 0 for x in seed) for seed in seeds.values()) for name, seeds in changes.items()}
    assert counts["MA"] == [2, 5, 6] and counts["SVGD, as published"] == [0, 0, 7]


def test_the_figure_has_a_mark_for_every_named_row(replication):
    rows = [row for row in replication.claims() if row.name]
    root = ET.fromstring(replication.draw(rows))
    classes = [element.get("class") for element in root.iter()]
    assert classes.count("bar") == len(rows) and classes.count("paper") == len(rows) + 1  # one in the legend


def test_rows_at_the_papers_sizes_have_the_controls_of_the_study(replication):
    rows = {row.claim: row for row in replication.claims()}
    summary = json.loads((ROOT / "results" / "classification" / "paper_sizes.json").read_text())["age"]
    for claim, control in (
        ("against plain attention with the same settings", "ma@svgd"),
        ("against itself without repulsion", "svgd, no repulsion"),
    ):
        ours, values = rows[f"Age, SVGD: {claim}"].ours, summary["controls"][control]["of"]["svgd"]["accuracy"]
        assert (ours.mean, ours.low, ours.high) == tuple(100 * values[key] for key in ("difference", "low", "high"))
    assert rows["Age, SVGD: against itself without repulsion"].paper is None
    assert rows["Yelp, cosine kernel: more accurate (points)"].paper == pytest.approx(71.5 - 69.3)  # C.6 and Table 1
    assert rows["Age, SVGD: better calibrated (ECE, points)"].verdict == "cannot say"


def test_the_page_states_numbers_of_seeds_and_p_values_that_are_in_the_study(replication):
    """All ten seeds on Yelp, 25 of 27 on Age at the same settings; Holm's correction keeps four of eight gains."""
    page = replication.PAGE.read_text(encoding="utf-8")
    assert "in all ten seeds on Yelp" in page and "25 of 27 on Age" in page and "keeps the four gains" in page
    folder = ROOT / "results" / "classification"
    lines = lzma.decompress((folder / "paper_sizes" / "runs.jsonl.xz").read_bytes()).decode().splitlines()
    runs = [run for run in map(json.loads, lines) if "test" in run]
    accuracy = {(run["dataset"], run["arm"], run["seed"]): run["test"]["accuracy"] for run in runs}
    for data, plain, ahead, seeds in (("yelp", "ma", 10, 10), ("age", "ma@svgd", 25, 27)):
        ours = {seed: x for (name, arm, seed), x in accuracy.items() if (name, arm) == (data, "cosine-smoothing")}
        assert len(ours) == seeds and sum(x > accuracy[data, plain, seed] for seed, x in ours.items()) == ahead
    summaries = json.loads((folder / "paper_sizes.json").read_text()).values()
    arms = [row for summary in summaries for row in summary["arms"].values() if "against_plain" in row]
    gains = [row["against_plain"]["accuracy"] for row in arms]
    ordered = sorted(gain["p"] for gain in gains)
    corrected = [max(p * (8 - i) for i, p in enumerate(ordered[: k + 1])) for k in range(8)]
    assert len(ordered) == 8 and sum(p < 0.05 for p in corrected) == 4 == sum(gain["low"] > 0 for gain in gains)
