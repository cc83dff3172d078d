"""Intervals that the page on classifiers states are those of the tables it links to."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "classifiers.md").read_text(encoding="utf-8")
INTERVAL = re.compile(r"([+-]?\d+\.\d+)(?: points)? ?\[([+-]?\d+\.\d+), ([+-]?\d+\.\d+)\]")
LINK = re.compile(r"\((\.\./results/[^)]+\.md)\)")


def numbers(match: re.Match[str]) -> tuple[float, ...]:
    return tuple(float(number) for number in match.groups())


def test_every_interval_is_in_a_table():
    """The page states gains in points; tables may have errors, with the opposite sign, or shares, and more digits."""
    tables = " ".join((ROOT / "docs" / link).read_text(encoding="utf-8") for link in sorted(set(LINK.findall(PAGE))))
    measured = {numbers(match) for match in INTERVAL.finditer(tables)}
    measured |= {(-mean, -high, -low) for mean, low, high in measured}
    measured |= {(100 * mean, 100 * low, 100 * high) for mean, low, high in measured}
    stated = list(INTERVAL.finditer(" ".join(PAGE.split())))

    def is_measured(match: re.Match[str]) -> bool:
        digits = [len(text.partition(".")[2]) for text in match.groups()]
        own = numbers(match)
        return any(
            all(abs(a - b) <= 0.5 * 10.0**-n + 1e-9 for a, b, n in zip(own, other, digits, strict=True))
            for other in measured
        )

    assert len(stated) > 30
    assert [match.group() for match in stated if not is_measured(match)] == []
