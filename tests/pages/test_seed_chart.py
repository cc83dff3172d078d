"""The chart of one dot per seed: positions, joined dots, intervals, words."""

import re

import pytest

from repulsive.pages.data.seeds import SeedChart
from repulsive.pages.html.seed_chart import seed_chart

METHODS = ("plain", "repelled")
VALUES = {"plain": [0.5, 0.25], "repelled": [0.0, 0.25]}


def dots(page):
    """Position of every dot, by its title."""
    found = re.findall(r'<circle class="dot \w+" cx="([\d.]+)" cy="([\d.]+)" r="4"><title>(.*?)</title>', page)
    return {title: (float(x), float(y)) for x, y, title in found}


def test_every_run_is_a_dot_at_its_value():
    page = seed_chart(SeedChart("cosine", VALUES, [7, 8], digits=2), METHODS)
    found = dots(page)
    assert list(found) == [
        "plain, seed 7: 0.50",
        "plain, seed 8: 0.25",
        "repelled, seed 7: 0.00",
        "repelled, seed 8: 0.25",
    ]
    assert found["plain, seed 8: 0.25"][1] == found["repelled, seed 8: 0.25"][1]
    assert found["plain, seed 7: 0.50"][1] < found["plain, seed 8: 0.25"][1] < found["repelled, seed 7: 0.00"][1]
    assert "plain: mean 0.38; repelled: mean 0.12" in page


def test_lines_join_the_runs_of_a_seed():
    page = seed_chart(SeedChart("cosine", VALUES, [7, 8], joined=True, digits=2), METHODS)
    found = dots(page)
    for seed, plain, repelled in ((7, "0.50", "0.00"), (8, "0.25", "0.25")):
        start, end = found[f"plain, seed {seed}: {plain}"], found[f"repelled, seed {seed}: {repelled}"]
        assert f'<path class="pair" d="M{start[0]} {start[1]}L{end[0]} {end[1]}"/>' in page
    assert page.count('class="pair"') == 2


def test_intervals_and_zero_are_drawn():
    chart = SeedChart("difference", {"repelled": [-0.5, 0.0]}, [7, 8], {"repelled": (-1.0, 0.5)}, zero=True, digits=2)
    page = seed_chart(chart, METHODS)
    low, high = map(float, re.search(r'<path class="whisker m1" d="M[\d.]+ ([\d.]+)V([\d.]+)', page).groups())
    zero = float(re.search(r'<path class="diagonal" d="M52 ([\d.]+)H', page)[1])
    mean = float(re.search(r'<circle class="mean m1" cx="[\d.]+" cy="([\d.]+)"', page)[1])
    assert high < zero < mean < low  # y grows downwards
    assert (low - zero) == pytest.approx(2 * (zero - high), abs=0.3)
    assert "mean −0.25, interval −1.00 to 0.50" in page


def test_equal_values_have_an_axis():
    assert len(dots(seed_chart(SeedChart("flat", {"plain": [1.0, 1.0]}, [0, 1]), METHODS))) == 2


def test_names_are_escaped():
    name = "<script>alert(1)</script>"
    assert "<script>" not in seed_chart(SeedChart(name, {name: [1.0, 2.0]}, [0, 1]), (name,))


@pytest.mark.parametrize("values", [[1.0], [], [1.0, float("nan")]])
def test_every_seed_needs_a_number(values):
    with pytest.raises(ValueError, match="expected a finite number of 'plain' for each of 2 seeds"):
        SeedChart("cosine", {"plain": values}, [0, 1])


def test_intervals_need_values():
    with pytest.raises(ValueError, match=r"intervals of \['repelled'\]"):
        SeedChart("cosine", {"plain": [1.0]}, [0], {"repelled": (0.0, 1.0)})
