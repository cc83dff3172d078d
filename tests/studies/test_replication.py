"""The table, the figure and the sentences of docs/replication.md agree with the files in results/."""

import json
from pathlib import Path

import pytest

from tests.scripts import study

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def replication():
    with study("studies.replication") as module:
        yield module


def test_the_page_and_the_figure_are_up_to_date(replication, monkeypatch, tmp_path, capsys):
    assert replication.main(["--check"]) == 0, capsys.readouterr().out
    old = tmp_path / "replication.md"
    old.write_text(replication.PAGE.read_text(encoding="utf-8").replace("| cannot say |", "| holds |", 1))
    monkeypatch.setattr(replication, "PAGE", old)
    assert replication.main(["--check"]) == 1 and "out of date" in capsys.readouterr().out


def test_the_seeds_behind_the_redundant_heads(replication):
    """The page says that all heads whose removal helps belong to one seed of the published rule."""
    changes = json.loads((ROOT / "results" / "translation" / "redundancy.json").read_text())
    counts = {name: sorted(sum(x > 0 for x in seed) for seed in seeds.values()) for name, seeds in changes.items()}
    assert counts["MA"] == [2, 5, 6] and counts["SVGD, as published"] == [0, 0, 7]
