"""Intervals that the page on logits states are those of the tables it links to."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
INTERVAL = re.compile(r"[+-]0\.\d{4} \[[+-]0\.\d{4}, [+-]0\.\d{4}\]")


def test_every_interval_is_in_a_table():
    stated = INTERVAL.findall((ROOT / "docs" / "logits.md").read_text(encoding="utf-8"))
    tables = " ".join(file.read_text(encoding="utf-8") for file in (ROOT / "results" / "logits").glob("*.md"))
    assert len(stated) > 15
    assert [interval for interval in stated if interval not in tables] == []
