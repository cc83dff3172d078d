"""The pictures show what the rules do today, and what the text below them says."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.pages.browser import driven_browser, needs_driver

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"


@pytest.fixture(scope="module")
def particles():
    spec = importlib.util.spec_from_file_location("particles_pictures", PICTURES / "particles.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def panels(particles):
    return {name: draw() for name, (draw, _) in particles.PICTURES.items()}


def numbers(svg: str) -> list[float]:
    return [float(word) for word in re.findall(r"-?\d+\.\d+", svg.split("</style>")[1])]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rules.svg", "alphas.svg", "spaces.svg"])
def test_the_files_are_what_the_script_draws(particles, panels, name):
    drawn = particles.draw(panels[name], particles.PICTURES[name][1])
    kept = (PICTURES / name).read_text(encoding="utf-8")
    assert re.sub(r"-?\d+\.\d+", "", drawn) == re.sub(r"-?\d+\.\d+", "", kept)
    # Not to the last digit: processors round differently.
    assert max(abs(a - b) for a, b in zip(numbers(drawn), numbers(kept), strict=True)) <= 1.0


def test_plain_particles_collapse_and_the_samplers_do_not(particles, panels):
    plain, svgd, spos = (panel.path[-1] for panel in panels["rules.svg"])
    assert torch.pdist(plain).max() < 1e-3
    assert torch.pdist(svgd).min() > 0.1
    assert [particles.count_modes(end) for end in (plain, svgd, spos)] == [1, 2, 3]


def test_more_alpha_spreads_and_too_much_leaves_the_modes(particles, panels):
    none, one, much = (panel.path[-1] for panel in panels["alphas.svg"])
    assert torch.pdist(none).max() < 1e-3
    assert torch.pdist(one).mean() < torch.pdist(much).mean()
    beyond = torch.cdist(much, particles.MODES).amin(1) > 3 * particles.WIDTH
    assert beyond.sum() >= 4
    assert not (torch.cdist(one, particles.MODES).amin(1) > 3 * particles.WIDTH).any()


def test_weights_grow_and_directions_spread_evenly(panels):
    weights, sphere = (panel.path[-1] for panel in panels["spaces.svg"])
    assert weights.norm(dim=1).mean() > 2 * 1.5
    assert torch.allclose(sphere.norm(dim=1), torch.full((5,), 1.5, dtype=sphere.dtype), atol=0.05)
    angles = torch.atan2(sphere[:, 1], sphere[:, 0]).sort().values
    gaps = torch.cat([angles.diff(), angles[:1] + 2 * torch.pi - angles[-1:]])
    assert torch.allclose(gaps, torch.full_like(gaps, 2 * torch.pi / 5), atol=0.15)


@pytest.fixture(scope="module")
def tetrahedron():
    spec = importlib.util.spec_from_file_location("heads_picture", PICTURES / "heads.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_four_heads_open_into_a_tetrahedron(tetrahedron):
    path = tetrahedron.path()
    cosines = tetrahedron.largest_cosines(path)
    assert cosines[0] > 0.98 and cosines[-1] == pytest.approx(-1 / 3, abs=0.01)
    end = path[-1] / path[-1].norm(dim=-1, keepdim=True)
    assert torch.allclose(end @ end.T, torch.eye(4, dtype=end.dtype) * 4 / 3 - 1 / 3, atol=0.05)
    assert path.norm(dim=-1).sub(1).abs().max() < 0.05  # the force is tangential


def test_the_animation_is_what_the_script_draws(tetrahedron):
    drawn, kept = tetrahedron.draw(tetrahedron.path()), (PICTURES / "heads.svg").read_text(encoding="utf-8")
    assert re.sub(r"-?\d+\.\d+", "", drawn) == re.sub(r"-?\d+\.\d+", "", kept)
    assert max(abs(a - b) for a, b in zip(numbers(drawn), numbers(kept), strict=True)) <= 1.0
    assert len(kept) < 60_000 and kept.count("<animate ") == 6 * 4 + 4 * 2 + 4 * 3 + 2 and "http" not in kept[90:]
    still = kept[kept.index('class="still"') :]
    assert "animate" not in still and still.count("<line") == 10


@needs_driver
def test_the_animation_stands_still_where_motion_is_reduced():
    with driven_browser() as browser:
        for motion, shown in (("reduce", "still"), ("no-preference", "moving")):
            context = browser.new_context(reduced_motion=motion)
            page = context.new_page()
            page.goto((PICTURES / "heads.svg").as_uri())
            visible = "[...document.querySelectorAll('g')].filter((g) => getComputedStyle(g).display !== 'none')"
            assert page.evaluate(f"{visible}.map((g) => g.getAttribute('class'))") == [shown]
            context.close()
