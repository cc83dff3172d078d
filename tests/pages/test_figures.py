"""Charts contain the measured values; pages and figure files draw the same charts."""

import doctest
import re
from importlib.resources import files
from itertools import pairwise

import pytest
import torch

from repulsive.diagnostics.calibration import reliability
from repulsive.diagnostics.head_count import HeadCount, HeadFit
from repulsive.diagnostics.uncertainty import entropy_cdf
from repulsive.errors import ConfigError
from repulsive.pages import Chart, Content, Grid, Panel, Series, Sheet, charts, render_page
from repulsive.pages.axes import tick_text
from repulsive.pages.charts import (
    entropy_chart,
    heads_chart,
    histogram,
    histogram_edges,
    learning_curve,
    redundancy_charts,
    reliability_charts,
)
from repulsive.pages.figures import write as figure_files
from repulsive.pages.figures.chart import COLOURS, chart_figure
from repulsive.pages.html.panel import panel_section
from repulsive.pages.html.svg_chart import svg_chart
from repulsive.pages.text import number
from tests.pages.sample import sample_content
from tests.test_imports import SOURCE, eager_third_party


def numbers(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"-?\d+\.?\d*", text)]


def test_the_example_in_the_docstring_runs():
    result = doctest.testmod(charts)
    assert result.attempted and not result.failed


def test_a_learning_curve_has_the_mean_and_a_band_of_one_standard_deviation():
    runs = {"MA": [[(10, 1.0), (20, 2.0), (30, 9.0)], [(10, 3.0), (20, 2.0)]], "SVGD": [[(10, 5.0)]]}
    ma, svgd = learning_curve("loss", runs).series
    assert ma.points == [(10, 2.0), (20, 2.0)]  # step 30 is not in every seed
    assert list(ma.band[0]) == pytest.approx([10, 2 - 2**0.5, 2 + 2**0.5]) and list(ma.band[1]) == [20, 2, 2]
    assert svgd.points == [(10, 5.0)] and svgd.band == []
    gap = learning_curve("loss", {"MA": [[(1, 1.0), (2, float("nan"))], [(1, 1.0), (2, 1.0)]]}).series[0]
    assert [x for x, *_ in gap.band] == [1]


def test_a_histogram_by_hand():
    edges = torch.tensor([-1.5, -0.5, 0.5, 1.5]).double()
    assert histogram(torch.tensor([-1.0, -0.5, 0.0, 0.2, 1.5]), edges).tolist() == pytest.approx([0.2, 0.6, 0.2])


@pytest.mark.parametrize("values", [[-10.6, 1.0], [0.0, 0.0], [0.3, 4.0], [-0.002, 0.001]])
def test_bins_cover_all_values_and_one_is_centred_at_zero(values):
    edges = histogram_edges(torch.tensor(values)).tolist()
    assert edges[0] <= min(values) and edges[-1] >= max(values) and len(edges) <= 16
    zero = [(low, high) for low, high in pairwise(edges) if low < 0 < high]
    assert len(zero) == 1 and zero[0][0] == pytest.approx(-zero[0][1])
    assert float(histogram(torch.tensor(values), torch.tensor(edges)).sum()) == pytest.approx(1)


def test_methods_share_bins_and_axes_and_every_head_counts_once():
    changes = {"MA": torch.tensor([[-0.2, 0.1, float("nan")]]), "SVGD": torch.tensor([-8.0, -3.0, 0.0])}
    first, second = redundancy_charts(changes, "change")
    assert (first.x_limits, first.y_limits) == (second.x_limits, second.y_limits)
    for chart in (first, second):
        (series,) = chart.series
        assert sum(height for _, height in series.points) == pytest.approx(100)
    assert [height for _, height in first.series[0].points if height] == pytest.approx([100.0])
    drawn = svg_chart(second, ["MA", "SVGD"])
    assert re.search(r'class="bars m1" d="([^"]*)"', drawn)[1].count("M") == 3  # heads in three bins


def test_a_reliability_diagram_has_a_dot_for_each_bin_with_items():
    p = torch.tensor([[0.95, 0.05], [0.9, 0.1], [0.62, 0.38], [0.55, 0.45]])
    diagram = reliability(p, torch.tensor([0, 1, 0, 1]), bins=10)
    (chart,) = reliability_charts({"MA": diagram})
    line, dots = chart.series
    assert [list(point) for point in dots.points] == [
        pytest.approx([0.55, 0.0]),
        pytest.approx([0.62, 1.0]),
        pytest.approx([0.9, 0.0]),
        pytest.approx([0.95, 1.0]),
    ]
    assert line.points == dots.points and dots.sizes == [1.0] * 4 and f"ECE {diagram.ece:.3f}" in chart.note
    drawn = svg_chart(chart, ["MA"])
    assert drawn.count("<circle") == 4 and 'class="diagonal"' in drawn


def test_an_entropy_curve_ends_at_one():
    chart = entropy_chart("Foreign", {"MA": entropy_cdf(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))})
    assert chart.series[0].points[0] == (0.0, 0.5) and chart.series[0].points[-1][1] == 1.0


def test_numbers_of_heads_are_on_a_logarithmic_axis_and_the_fit_passes_through_the_means():
    points = [HeadCount(m, (2.0 + m, 4.0 + m)) for m in (1, 2, 4)]
    chart = heads_chart({"MA": points}, {"MA": HeadFit(0.0, 1.0, 3.0)}, "error (%)")
    dots, fit = chart.series
    assert dots.points == [(1, 4.0), (2, 5.0), (4, 7.0)] and len(dots.band) == 3 and fit.mark == "fit"
    assert fit.points[0] == pytest.approx((1, 4)) and fit.points[-1] == pytest.approx((4, 7))
    drawn = svg_chart(chart, ["MA"])
    x = [float(place) for place in re.findall(r'<circle[^>]* cx="([\d.]+)"', drawn)]
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2)
    assert ">1</text>" in drawn and ">2</text>" in drawn and ">4</text>" in drawn and 'class="band m0"' in drawn
    with pytest.raises(ValueError, match="logarithmic"):
        Chart("error", [Series("MA", [(0, 1.0)])], x_log=True)


def test_bars_start_at_zero():
    drawn = svg_chart(Chart("heads", [Series("MA", [(0, 95.0), (1, 96.0), (2, 95.0)], mark="bars")]), ["MA"])
    _, ground, top, *_ = numbers(re.search(r'class="bars m0" d="([^"]*)"', drawn)[1])
    floor = max(float(y) for y in re.findall(r'class="grid" d="M\d+ ([\d.]+)', drawn))
    assert ground == floor and top < ground and ">0</text>" in drawn
    tall = svg_chart(Chart("heads", [Series("MA", [(0, 95.0), (1, 0.0)], mark="bars")], y_limits=(0, 190)), ["MA"])
    _, low, half, *_ = numbers(re.search(r'class="bars m0" d="([^"]*)"', tall)[1])
    assert low - half == pytest.approx((ground - top) * (95 / 200) / (95 / 100), abs=0.2)


def test_a_band_encloses_its_line():
    band = [(0, 1.0, 3.0), (10, 2.0, 4.0)]
    drawn = svg_chart(Chart("loss", [Series("MA", [(0, 2.0), (10, 3.0)], band)]), ["MA"])
    area = numbers(re.search(r'class="band m0" d="([^"]*)Z"', drawn)[1])
    line = numbers(re.search(r'class="line m0" d="([^"]*)"', drawn)[1])
    assert area[1] < line[1] < area[7] and area[3] < line[3] < area[5]  # above, below: y grows downwards


def test_data_that_cannot_be_drawn_is_rejected():
    with pytest.raises(ValueError, match="1 sizes for 2 points"):
        Series("MA", [(0, 1), (1, 1)], mark="dots", sizes=[1.0])
    with pytest.raises(ValueError, match="left edge"):
        Series("MA", [(0, 1)], mark="bars")
    with pytest.raises(ValueError, match="finite"):
        Grid("MA", torch.tensor([[1.0, float("nan")], [0.0, 1.0]]))
    with pytest.raises(ValueError, match="2 cells for 1 columns"):
        Sheet("t", ["a"], [["b", "c"]])


def full_content() -> Content:
    """A learning curve, grids, dots and bars; method names contain markup and formula characters."""
    base = sample_content(1)
    hostile = "<b>$x^</b>"
    panel = Panel(
        "Similarity <i>",
        ["<u>read</u>"],
        [Grid("MA", torch.eye(3), "cosine"), Grid(hostile, torch.ones(2, 2), "cosine")],
        [
            Chart("dots", [Series(hostile, [(0, 1), (1, 2)], mark="dots")], diagonal=True),
            Chart("bars", [Series("MA", [(0, 1), (1, 0)], mark="bars")], x_name=hostile),
        ],
        [Sheet("<s>", ["<q>", "b"], [["<a>", "<em>"]])],
        ["<note>"],
    )
    return Content(base.title, charts=base.charts[:1], panels=[panel])


def test_panels_are_escaped_and_use_the_colours_of_the_page():
    content = full_content()
    page = render_page(content)
    assert not re.findall(r"<(?:b>\$|i>|u>|s>|q>|a>|em>|note>)", page)
    section = panel_section(content.panels[0], content.methods())
    assert (
        'class="dot m4"' in section and 'class="bars m0"' in section
    )  # the hostile method comes after the four of the curve
    assert "cosine of 3 heads of MA: mean over pairs 0.00" in section


def test_grids_of_panels_replace_those_of_the_examples():
    base = sample_content(1)
    with_grids = Content(base.title, examples=base.examples, panels=[Panel("Alike", grids=[Grid("MA", torch.eye(2))])])
    assert "averaged over the example of this page" not in render_page(with_grids)
    assert "averaged over the example of this page" in render_page(Content(base.title, examples=base.examples))


def test_every_chart_and_row_of_grids_becomes_svg_and_pdf(tmp_path):
    content = full_content()
    written = figure_files.write_figures(tmp_path / "figures", content)
    names = {path.stem for path in written}
    assert names == {"train-loss", "dots", "bars", "cosine"}
    assert len(written) == 2 * len(names) and {path.suffix for path in written} == {".svg", ".pdf"}
    for path in written:
        start = path.read_bytes()[:200]
        assert start.startswith(b"%PDF-") if path.suffix == ".pdf" else b"<?xml" in start
    again = figure_files.write_figures(tmp_path / "again", Content("T", charts=content.charts))
    assert {path.name for path in again} == {"train-loss.svg", "train-loss.pdf"}
    assert all(path.read_bytes() == (tmp_path / "figures" / path.name).read_bytes() for path in again)


def test_a_long_name_fits_beside_the_y_axis():
    matplotlib = pytest.importorskip("matplotlib")
    chart = learning_curve("Largest attention logit, mean over heads", {"MA": [[(0, 1.0), (1, 2.0)]]})
    with matplotlib.rc_context(figure_files._SETTINGS):
        figure = chart_figure(chart, ["MA"])
        figure.draw_without_rendering()
        label = figure.axes[0].yaxis.label.get_window_extent()
    assert label.y0 >= 0 and label.y1 <= figure.bbox.height


def test_figures_use_the_colours_of_the_page():
    style = files("repulsive.pages.html").joinpath("page.css").read_text(encoding="utf-8")
    light = re.search(r":root \{(.*?)\}", style, re.S)[1]
    assert [re.search(rf"--m{i}: (#\w+)", light)[1] for i in range(8)] == list(COLOURS)


def test_without_matplotlib_the_error_names_the_extra_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(figure_files, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[report\]'"):
        figure_files.write_figures(tmp_path, full_content())


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match="choose another --figures"):
        figure_files.write_figures(tmp_path / "taken", full_content())


def test_pages_need_no_matplotlib():
    for path in SOURCE.joinpath("pages").rglob("*.py"):
        assert "matplotlib" not in eager_third_party(path.read_text()), path


def test_sixteen_methods_have_different_line_styles_on_the_page_and_in_the_file():
    methods = [f"method {place}" for place in range(16)]
    chart = Chart("loss", [Series(method, [(0.0, 1.0), (1.0, float(place))]) for place, method in enumerate(methods)])
    kinds = re.findall(r'<path class="(line [^"]*)"', svg_chart(chart, methods))
    assert len(set(kinds)) == len(kinds) == 16
    pytest.importorskip("matplotlib")
    (axes,) = chart_figure(chart, methods).axes
    assert len({(line.get_color(), str(line._dash_pattern)) for line in axes.lines}) == 16


def test_an_axis_in_thousands_starts_at_a_plain_zero():
    assert [tick_text(x, [0.0, 20_000.0, 40_000.0]) for x in (0.0, 20_000.0)] == ["0", "20k"]


@pytest.mark.parametrize("value", [-0.0001, -0.004])
def test_values_that_round_to_zero_have_no_sign(value):
    assert number(value, 2) == "0.00"
    assert number(value, 2, signed=True) == "−0.00"  # the sign is the information here
