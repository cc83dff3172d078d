"""Draw the pictures of `how-it-works.md`: particles in the plane, moved by the rules of the package.

    python docs/pictures/particles.py            # writes three SVG files into this folder

All seeds are fixed, so the files change only when the rules change.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from repulsive import SPOS, SVGD
from repulsive.particles.rule import Rule

MODES = torch.tensor([[-2.2, -1.2], [2.1, -0.6], [0.1, 2.0]], dtype=torch.float64)  # [3, 2]
WIDTH = 0.75  # standard deviation of each mode
SIZE, EDGE = 230, 4.6  # a panel is SIZE pixels wide and shows the plane from -EDGE to EDGE

STYLE = """
  .card { fill: #fbfbf8; stroke: #d5d5cf } .title { fill: #202020 } .note { fill: #5a5a55 }
  .ring { fill: none; stroke: #9a9a92; stroke-width: 1 } .trail { fill: none; stroke: #00796b; stroke-opacity: .25 }
  .start { fill: none; stroke: #5a5a55 } .head { fill: #d84315; stroke: #fbfbf8; stroke-width: .8 }
  text { font-family: sans-serif; font-size: 12px } .title { font-weight: bold }
  @media (prefers-color-scheme: dark) {
    .card { fill: #23262f; stroke: #3c404c } .title { fill: #f0f0f0 } .note { fill: #b4b8c4 }
    .ring { stroke: #6f7484 } .trail { stroke: #4db6ac; stroke-opacity: .45 }
    .start { stroke: #b4b8c4 } .head { fill: #ff8a65; stroke: #23262f }
  }
"""


@dataclass(frozen=True)
class Panel:
    """One square of a picture: the paths of particles [steps, M, 2], and circles (x, y, radius) in the background."""

    title: str
    note: str
    path: Tensor
    rings: Sequence[tuple[float, float, float]]


def mixture_gradient(theta: Tensor) -> Tensor:
    """Gradient of U = -log p, for a mixture p of three equal Gaussians: [M, 2] -> [M, 2]."""
    offset = theta[:, None] - MODES  # [M, 3, 2]
    share = torch.softmax(-offset.square().sum(-1) / (2 * WIDTH**2), dim=1)  # [M, 3]
    return (share[..., None] * offset).sum(1) / WIDTH**2


def descend(rule: Rule | None, start: Tensor, gradient: Callable[[Tensor], Tensor], steps: int, lr: float) -> Tensor:
    """Move particles by a rule and plain SGD and return their path [steps + 1, M, 2]; None follows the own gradient."""
    theta = start.clone().requires_grad_()
    optimizer = torch.optim.SGD([theta], lr=lr)
    noise = torch.Generator().manual_seed(1)
    path = [start.clone()]
    for _ in range(steps):
        grad = gradient(theta.detach())
        theta.grad = grad if rule is None else rule.gradient(theta.detach(), grad, noise, lr=lr)
        optimizer.step()
        path.append(theta.detach().clone())
    return torch.stack(path)


def starting_points(count: int = 16, seed: int = 3) -> Tensor:
    """Draw particles that start close to each other: [M, 2]."""
    generator = torch.Generator().manual_seed(seed)
    return 0.35 * torch.randn(count, 2, generator=generator, dtype=torch.float64) + torch.tensor([-2.6, 2.4])


def count_modes(theta: Tensor) -> int:
    """Count the modes that have a particle within two standard deviations."""
    is_near = torch.cdist(theta, MODES) < 2 * WIDTH
    return int(is_near.any(0).sum())


def rules() -> list[Panel]:
    """Compare plain training, SVGD and SPOS on the same mixture from the same start."""
    paths = {
        "MA: each for itself": descend(None, starting_points(), mixture_gradient, 100, 0.25),
        "SVGD": descend(SVGD(stepsize=1.0, alpha=1.0), starting_points(), mixture_gradient, 800, 0.25),
        "SPOS": descend(SPOS(1.0, 1.0, beta=10.0), starting_points(), mixture_gradient, 800, 0.25),
    }
    return [Panel(name, f"modes found: {count_modes(path[-1])} of 3", path, _modes()) for name, path in paths.items()]


def alphas() -> list[Panel]:
    """Compare repulsive weights of SVGD from the same start."""
    panels = []
    for alpha in (0.0, 1.0, 8.0):
        path = descend(SVGD(stepsize=1.0, alpha=alpha), starting_points(), mixture_gradient, 800, 0.25)
        spread = float(torch.pdist(path[-1]).mean())
        panels.append(Panel(f"alpha = {alpha:g}", f"mean distance {spread:.1f}", path, _modes()))
    return panels


def spaces() -> list[Panel]:
    """Compare repulsion between weights and on the sphere for five heads whose loss gradient is zero."""
    angle = torch.tensor([0.2, 0.5, 0.7, 1.1, 1.3], dtype=torch.float64)
    start = 1.5 * torch.stack([angle.cos(), angle.sin()], dim=1)  # [5, 2]
    panels = []
    for space, title in {"weights": "repulsion between weights", "sphere": "repulsion on the sphere"}.items():
        path = descend(SVGD(stepsize=1.0, alpha=1.0, space=space), start, torch.zeros_like, 300, 0.1)
        norm = float(path[-1].norm(dim=1).mean())
        panels.append(Panel(title, f"mean norm 1.5, at the end {norm:.1f}", path, [(0.0, 0.0, 1.5)]))
    return panels


def _modes() -> list[tuple[float, float, float]]:
    return [(float(x), float(y), times * WIDTH) for x, y in MODES for times in (1, 2)]


def _pixels(point: Tensor) -> tuple[float, float]:
    """Convert a point of the plane to pixels of its panel."""
    half = SIZE / 2
    return half + half * float(point[0]) / EDGE, half - half * float(point[1]) / EDGE


def _panel(panel: Panel, left: int) -> list[str]:
    scale = SIZE / 2 / EDGE
    lines = [f'<g transform="translate({left} 0)">', f'<rect class="card" width="{SIZE}" height="{SIZE + 44}" rx="6"/>']
    lines += [
        f'<text class="title" x="10" y="20">{panel.title}</text>',
        f'<text class="note" x="10" y="36">{panel.note}</text>',
        f'<svg y="42" width="{SIZE}" height="{SIZE}">',
    ]
    for x, y, radius in panel.rings:
        across, down = _pixels(torch.tensor([x, y]))
        lines.append(f'<circle class="ring" cx="{across:.1f}" cy="{down:.1f}" r="{radius * scale:.1f}"/>')
    thinned = panel.path[:: math.ceil(len(panel.path) / 60)]
    for particle in range(panel.path.shape[1]):
        points = [_pixels(point) for point in (*thinned[:, particle], panel.path[-1, particle])]
        lines.append(f'<polyline class="trail" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>')
    for name, radius, step in (("start", 2.0, 0), ("head", 4.0, -1)):
        for x, y in (_pixels(point) for point in panel.path[step]):
            lines.append(f'<circle class="{name}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"/>')
    return [*lines, "</svg>", "</g>"]


def draw(panels: Sequence[Panel], about: str) -> str:
    """Draw panels side by side as one SVG whose colours follow the light or dark mode of the browser."""
    width = len(panels) * (SIZE + 10) - 10
    pieces = [line for i, panel in enumerate(panels) for line in _panel(panel, i * (SIZE + 10))]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 -1 {width + 2} {SIZE + 46}" width="{width + 2}">'
    return "\n".join([head, f"<title>{about}</title>", f"<style>{STYLE}</style>", *pieces, "</svg>"]) + "\n"


PICTURES = {
    "rules.svg": (rules, "Sixteen particles on a mixture of three modes: plain, SVGD, SPOS"),
    "alphas.svg": (alphas, "The same particles under SVGD with three repulsive weights"),
    "spaces.svg": (spaces, "Five heads that nothing pulls back, repelled as weights and on the sphere"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    out = parser.parse_args().out
    for name, (panels, about) in PICTURES.items():
        (out / name).write_text(draw(panels(), about), encoding="utf-8")


if __name__ == "__main__":
    main()
