"""The live page and the film of the head monitor."""

import math
import re
import shutil
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
import torch
from torch import nn

from repulsive import HeadMonitor, HeadWarning, SelectionError, Thresholds
from repulsive.monitoring.embedding import align, aligned_positions, classical_scaling
from repulsive.monitoring.film_layers import MOST_FRAMES, film_layers
from repulsive.monitoring.history import MOST, History
from repulsive.monitoring.live_page import page_content
from repulsive.monitoring.measurement import LayerMeasurement, Measurement
from repulsive.monitoring.problems import Problem
from repulsive.pages.html.film import FilmLayer, film
from repulsive.pages.monitor_page import render_monitor_page
from tests.pages.browser import driven_browser, driven_page, needs_driver, violations


def cosines(points):
    """Cosine matrix of unit vectors at the given angles."""
    unit = torch.stack([torch.tensor([math.cos(a), math.sin(a)], dtype=torch.float64) for a in points])
    return unit @ unit.T, unit


def history_of(steps, layers=2, heads=3):
    history = History()
    for step in steps:
        matrix, _ = cosines([0.3 * head + 0.01 * step * head for head in range(heads)])
        rows = tuple(map(tuple, matrix.tolist()))
        history.add(
            Measurement(
                step,
                tuple(
                    LayerMeasurement(f"l{i}", f"layer {i}", (1.0 + step,) * heads, (2.0,) * heads, (1.0,) * heads, rows)
                    for i in range(layers)
                ),
            )
        )
    return history


def test_classical_scaling_keeps_distances_that_fit_into_a_plane():
    matrix, unit = cosines([0.1, 1.0, 2.5, 4.0])
    positions = classical_scaling(matrix)
    assert torch.cdist(positions, positions) == pytest.approx(torch.cdist(unit, unit), abs=1e-9)
    assert positions.mean(0) == pytest.approx(torch.zeros(2), abs=1e-12)
    single = classical_scaling(torch.ones(1, 1))
    assert single.shape == (1, 2) and single.abs().max() == 0


def test_turning_undoes_rotation_and_reflection_and_never_stretches():
    points = torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    points = points - points.mean(0)
    angle = torch.tensor(0.7)
    turn = torch.tensor([[angle.cos(), angle.sin()], [-angle.sin(), angle.cos()]], dtype=torch.float64)
    for change in (turn, turn @ torch.diag(torch.tensor([1.0, -1.0], dtype=torch.float64))):
        assert align(points @ change, points) == pytest.approx(points, abs=1e-7)
    assert torch.cdist(align(points, points.flip(0)), align(points, points.flip(0))) == pytest.approx(
        torch.cdist(points, points)
    )
    target, best = points.flip(0), align(points, points.flip(0))
    for step in range(0, 628, 5):  # no rotation or reflection is closer
        c, s = math.cos(step / 100), math.sin(step / 100)
        for sign in (1, -1):
            other = points @ torch.tensor([[c, s], [-sign * s, sign * c]], dtype=torch.float64)
            assert (best - target).norm() <= (other - target).norm() + 1e-9


def test_slow_movement_gives_small_moves_between_frames():
    frames = aligned_positions([cosines([0, 1 + t / 50, 2.2, 3.9 - t / 40])[0] for t in range(30)])
    moves = torch.stack([(b - a).norm(dim=-1).max() for a, b in pairwise(frames)])
    assert float(moves.max()) < 0.05
    equal = aligned_positions([torch.ones(3, 3)] * 3)
    assert all(torch.equal(frame, torch.zeros(3, 2, dtype=torch.float64)) for frame in equal)


def test_the_film_is_one_valid_file_without_scripts_and_with_a_still_picture():
    steps, layers = film_layers(history_of(range(0, 100, 10)))
    assert steps == list(range(0, 100, 10)) and [layer.name for layer in layers] == ["layer 0", "layer 1"]
    text = film("Heads <of> a & b", steps, layers)
    root = ElementTree.fromstring(text)
    names = [element.tag.split("}")[1] for element in root.iter()]
    assert root[0].text == "Heads <of> a & b" and "script" not in names and "http" not in text.split("viewBox")[1]
    assert names.count("circle") == 2 * 3 + 1  # heads, and the mark on the timeline
    style = next(element.text for element in root.iter() if element.tag.endswith("style"))
    assert "prefers-reduced-motion:reduce){.head{animation:none" in style and "prefers-color-scheme:dark" in style
    keys = re.search(r"@keyframes l0h2\{(.*?)\}\}", style)[1]
    assert len(re.findall(r"%\{", keys)) == len(steps) + 1
    assert len(film_layers(history_of(range(MOST)))[0]) <= MOST_FRAMES + 1
    for count in (1, 5, 12):
        ElementTree.fromstring(film("t", [0, 1], [FilmLayer("x", [[(0.0, 0.0)] * 2] * 2)] * count))


def test_a_film_needs_two_measurements():
    with pytest.raises(SelectionError, match="a film needs two measurements"):
        film_layers(history_of([0]))
    with pytest.raises(SelectionError, match="comparable heads, got 0"):
        film_layers(history_of([0, 1], heads=1))


def test_the_history_is_thinned():
    history = history_of(range(3 * MOST), layers=1)
    assert len(history) <= MOST and history[0].step == 0 and history[-1].step == 3 * MOST - 1
    history.add(Measurement(50, ()))  # resumed from an earlier checkpoint
    assert history[-1].step == 50 and all(a.step < b.step for a, b in pairwise(history))


def content(**changes):
    problems = [
        Problem("dead", "l0", (1,), 0, 2, "layer 0: <b>head</b> 1"),
        Problem("tokens", "l1", (), 1, 3, "newest"),
    ]
    settings = {"title": "T", "every": 10, "thresholds": Thresholds(), "is_live": True, **changes}
    return page_content(history_of([0, 10, 20], layers=10), problems, **settings)


def test_the_page_has_curves_of_every_layer_and_warnings_newest_first():
    page = render_monitor_page(content())
    assert page.index("newest") < page.index("&lt;b&gt;head&lt;/b&gt; 1") and "<b>head" not in page
    assert page.count("<figure") == 2 * 5  # two groups of layers; tokens were not measured
    assert "Curves of layer 0 to layer 7" in page and "Curves of layer 8 to layer 9" in page
    assert "layer 9 21 at 20" in page  # the entropy at step 20, for screen readers
    assert "location.reload" in page and "Training is running" in page
    ended = render_monitor_page(content(is_live=False))
    assert "reload" not in ended and "Training has ended" in ended and "<script" not in ended
    empty = page_content(History(), [], title="T", every=1, thresholds=Thresholds(), is_live=True)
    assert "none yet" in render_monitor_page(empty) and "None so far" in render_monitor_page(empty)


def test_the_monitor_rewrites_its_page_and_writes_a_film(tmp_path):
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2, enable_nested_tensor=False
    )
    path, seen = tmp_path / "new" / "heads.html", []
    with HeadMonitor(model, every=1) as monitor:
        assert monitor.page(path) == path
        for _ in range(3):
            seen.append(path.read_text())
            model(torch.randn(2, 5, 16)).sum().backward()
            monitor.step()
    assert ["none yet" in page for page in seen] == [True, False, False] and len(set(seen)) == 3
    assert "Training has ended" in path.read_text()
    assert ElementTree.fromstring(monitor.film(tmp_path / "heads.svg").read_text()) is not None


def test_a_full_disk_does_not_stop_the_training(tmp_path):
    model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    monitor = HeadMonitor(model, every=1)
    monitor.page(tmp_path / "heads" / "page.html")
    shutil.rmtree(tmp_path / "heads")
    (tmp_path / "heads").write_text("a file in place of the folder")

    def run():
        for _ in range(3):
            model(torch.randn(2, 5, 16))
            monitor.step()

    with pytest.warns(HeadWarning, match="page.html.: cannot be written") as caught:
        run()
    assert len(caught) == 1 and len(monitor.history) == 3
    with pytest.raises(OSError, match="heads"):
        monitor.page(tmp_path / "heads" / "page.html")


@needs_driver
@pytest.mark.slow
def test_the_page_in_a_browser(tmp_path):
    path = tmp_path / "page.html"
    path.write_text(render_monitor_page(content()), encoding="utf-8")
    with driven_browser() as browser:
        with driven_page(browser, path, width=390) as (page, messages):
            assert messages == [] and page.evaluate("document.documentElement.scrollWidth") == 390
        for dark in (False, True):
            assert violations(browser, path, dark=dark) == []
        path.write_text(render_monitor_page(content()).replace('data-seconds="5"', 'data-seconds="0.2"'))
        with driven_page(browser, path) as (page, messages):
            ended = path.with_name("ended.html")
            ended.write_text(render_monitor_page(content(is_live=False)))
            ended.replace(path)  # at once: a page that is reloaded half written would never be reloaded again
            page.wait_for_selector("text=Training has ended")
            assert messages == []
