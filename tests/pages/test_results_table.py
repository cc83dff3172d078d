"""Results table, number formatting, chart lines and the contrast of colours."""

import doctest
import math
import re
from importlib.resources import files

import pytest

from repulsive.metrics.compare import Comparison
from repulsive.pages import Cell, Chart, Metric, Row, Series, Table, axes, mean_and_sd, text
from repulsive.pages.axes import ticks
from repulsive.pages.html.results_table import best_rows, results_table, verdict
from repulsive.pages.html.svg_chart import MAX_POINTS, svg_chart


@pytest.mark.parametrize("module", [text, axes], ids=["text", "axes"])
def test_the_examples_in_the_docstrings_run(module):
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


def compared(difference: float, half_width: float, p: float) -> Comparison:
    return Comparison(difference, difference - half_width, difference + half_width, p, "both", 3, 100)


@pytest.mark.parametrize(
    ("better", "comparison", "expected"),
    [
        ("higher", compared(2, 1, 0.01), "better"),
        ("lower", compared(2, 1, 0.01), "worse"),
        ("lower", compared(-2, 1, 0.05), "better"),
        ("higher", compared(2, 3, 0.01), "unclear"),  # the interval contains zero
        ("higher", compared(2, 1, 0.25), "unclear"),  # the p-value is too large
        ("neither", compared(2, 1, 0.01), None),
        ("higher", None, None),
    ],
)
def test_a_difference_needs_interval_and_p_value(better, comparison, expected):
    assert verdict(Cell(1.0, 0.1, comparison), Metric("x", better), 0.05) == expected


def column(better: str, *cells: Cell | None) -> Table:
    rows = [Row(f"method {place}", [cell]) for place, cell in enumerate(cells)]
    return Table([Metric("x", better)], rows, baseline="method 0")


def test_the_best_mean_is_marked_only_where_it_beats_the_baseline():
    clear, unclear = compared(2, 1, 0.01), compared(2, 3, 0.4)
    assert best_rows(column("higher", Cell(1.0), Cell(3.0, None, clear), Cell(2.0, None, clear)), 0) == {1}
    assert best_rows(column("higher", Cell(1.0), Cell(3.0, None, unclear), Cell(2.0, None, clear)), 0) == set()
    assert best_rows(column("higher", Cell(4.0), Cell(3.0, None, compared(-1, 0.5, 0.01))), 0) == set()
    assert best_rows(column("lower", Cell(1.0), Cell(math.nan, None, clear), None), 0) == set()
    shown = results_table(column("higher", Cell(1.0), Cell(3.0, 0.1, clear), None))
    assert shown.count("★</span>") == 1 and "<b>3.000 ± 0.100</b>" in shown and "not measured" in shown


def test_without_comparisons_nothing_is_marked_and_the_legend_says_so():
    shown = results_table(column("higher", Cell(1.0), Cell(3.0)))
    assert "<b>" not in shown and "differences were not tested" in shown


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ((0.71424, 0.0031, 2, True), "71.42 ± 0.31"),
        ((1.5, None, 3, False), "1.500"),
        ((-1.5, 0.25, 1, False), "−1.5 ± 0.2"),
        ((math.inf, math.nan, 2, False), "∞ ± n/a"),
    ],
)
def test_mean_and_sd(given, shown):
    mean, sd, digits, percent = given
    assert mean_and_sd(mean, sd, digits, percent=percent) == shown


def test_inconsistent_tables_are_rejected():
    with pytest.raises(ValueError, match="not one of the methods"):
        Table([Metric("x")], [Row("MA", [Cell(1.0)])], baseline="MB")
    with pytest.raises(ValueError, match="2 cells for 1 metrics"):
        Table([Metric("x")], [Row("MA", [Cell(1.0), None])], baseline="MA")
    with pytest.raises(ValueError, match="choose 'higher'"):
        Metric("x", "up")


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 2000), (0.13, 0.58), (-3, 7), (5, 5), (0, 0), (1e-7, 3e-7), (68.2, 68.4), (0, 123456), (0.1, 0.1 + 2e-17)],
)
def test_ticks_cover_the_range_and_are_few(low, high):
    values = ticks(low, high, 5)
    assert values[0] <= low and values[-1] >= high and 2 <= len(values) <= 7
    assert values == sorted(set(values))


def test_a_line_passes_through_its_points():
    drawn = svg_chart(Chart("loss", [Series("MA", [(0, 0.0), (50, 5.0), (100, 10.0)])]), ["MA"])
    path = re.search(r'class="line m0" d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', drawn)
    assert path is not None
    x0, y0, x1, y1, x2, y2 = map(float, path.groups())
    assert x0 < x1 < x2 and y0 > y1 > y2
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1) and y1 == pytest.approx((y0 + y2) / 2, abs=0.1)
    assert "MA 10 at 100" in drawn


def test_missing_points_leave_a_gap_and_long_lines_are_thinned():
    gap = svg_chart(Chart("loss", [Series("MA", [(0, 1.0), (1, math.nan), (2, 1.5), (3, 2.0)])]), ["MA"])
    assert re.search(r'd="M[\d. ]+M[\d. ]+L[\d. ]+"', gap)
    long = svg_chart(Chart("loss", [Series("MA", [(i, i / 7) for i in range(3 * MAX_POINTS)])]), ["MA"])
    assert "every 3th" not in long and "one point in 3 is drawn" in long and long.count("L") <= MAX_POINTS + 1
    assert "no finite points" in svg_chart(Chart("loss", [Series("MA", [(0, math.nan)])]), ["MA"])
    assert "no finite points" in svg_chart(Chart("loss", []), ["MA"])


def luminance(colour: str) -> float:
    """Relative luminance as defined by WCAG 2."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(first: str, second: str) -> float:
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


STYLE = files("repulsive.pages.html").joinpath("page.css").read_text(encoding="utf-8")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_have_enough_contrast(scheme):
    light, dark = (
        dict(re.findall(r"(--\w+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", STYLE, re.S)
    )
    colours = {**light, **dark} if scheme == "dark" else light
    on_heat = dict(re.findall(r"\.h(\d) \{.*?[^-]color: var\((--\w+)\)", STYLE))
    assert sorted(on_heat) == list("0123456789")
    for step, over in on_heat.items():
        assert contrast(colours[over], colours[f"--h{step}"]) >= 4.5, f"text on heat map level {step}"
    for ground in ("--paper", "--raised"):
        for over in ("--ink", "--soft", "--good", "--bad"):
            assert contrast(colours[over], colours[ground]) >= 4.5, f"{over} on {ground}"
    for name in [f"--a{i}" for i in range(1, 7)] + [f"--m{i}" for i in range(8)]:
        assert contrast(colours[name], colours["--paper"]) >= 3, f"{name}: lines and underlines need a contrast of 3:1"
    heat = [luminance(colours[f"--h{step}"]) for step in range(10)]
    assert heat == sorted(heat, reverse=scheme == "light")
